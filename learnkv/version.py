"""The version, for the package's metadata and for whatever is written to disk."""

__version__ = "0.1.0"
