"""Whole training steps, timed against their peers: ``python -m benchmarks.run --help``."""
