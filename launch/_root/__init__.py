"""headstart: train, measure and export draft heads for lossless speculative decoding."""

__version__ = "0.1.0"
