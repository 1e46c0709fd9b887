"""Adaptive speculation for SGLang: speculate while the server is quiet, decode plainly while it is busy."""

__version__ = "0.1.0"
