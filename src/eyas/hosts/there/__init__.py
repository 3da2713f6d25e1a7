"""What runs on a host, at the far end of the link (`base.py`)."""
