"""The machines that a plan is for: devices, links, and where stages lie on ranks."""
