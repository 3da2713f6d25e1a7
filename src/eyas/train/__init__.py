"""Test-time training of the draft on captured features."""
