"""As the real one is written."""

__version__ = version = "0.32.0"
