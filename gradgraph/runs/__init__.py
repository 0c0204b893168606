"""Training runs (``gradgraph train``): options, data and step, execution, and output files.

This package may import all packages for data and training. It prints nothing: progress goes to the logger
``gradgraph.runs``.
"""
