"""Nodes and shapes: how a graph is written (``op.Name(...)``), read, named, checked and pruned.

It knows no file, no gradient and no runtime.
"""
