"""Several runs or plans side by side."""
