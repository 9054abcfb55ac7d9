"""The version, alone in its file so that the build can read it without importing the package."""

__version__ = "0.1.0"
