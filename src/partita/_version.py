"""The version, alone in a file so that the build can read it without importing anything."""

__version__ = "0.1.0"
