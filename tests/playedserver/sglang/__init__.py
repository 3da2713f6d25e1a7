"""SGLang as a reader of the documentation has it, played by tests/fakesglang.py."""
