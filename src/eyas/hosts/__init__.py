"""Machines behind SSH: their records, the link to them, what is shipped there, and runs whose runner lives there."""
