"""eyas: from a served language model to a verified EAGLE-3 draft model."""

__version__ = "0.1.0"
