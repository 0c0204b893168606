"""Readers of untrusted files: JSON, TOML, arrays, archives, ONNX messages. No other code reads such files.

Each reader returns values of known types, or raises a one-line UnreadableError, in bounded time and memory.
"""
