"""Speculative decoding in-process, and replay: the same acceptance predicted from captured features."""
