"""Samples become proven features: the contract that travels with them, and the proofs they have to pass."""
