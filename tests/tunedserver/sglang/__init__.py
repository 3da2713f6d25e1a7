"""A server that can be tuned, without a model: its flags say how fast it is, and what goes wrong."""
