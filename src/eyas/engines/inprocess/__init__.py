"""The embedded default engine: the target runs in this process, by transformers. It runs anywhere torch does."""
