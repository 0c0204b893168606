"""Nodes and shapes: writing graphs (``op.Name(...)``), naming, checking and pruning them.

It does not know files, gradients or runtimes.
"""
