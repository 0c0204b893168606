"""Readers of untrusted files, and the only place that reads them: JSON, TOML, arrays, archives, ONNX messages.

Each returns values of known types, or raises a one-line UnreadableError, in bounded time and memory.
"""
