"""Runnable recipes and the built-in prompt sets (data; no code)."""
