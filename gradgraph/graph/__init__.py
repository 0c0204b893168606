"""Nodes and shapes: writing graphs (``op.Name(...)``), naming, checking and pruning them.

This package does not depend on files, gradients or runtimes.
"""
