"""Timing of whole training steps of gradgraph and other libraries: ``python -m benchmarks.run --help``."""
