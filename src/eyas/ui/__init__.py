"""What people see in a terminal: the live table, plain lines, the closing summary."""
