"""Model files and weights on disk: read safely, written atomically.

This package checks the contents of files; other packages interpret the computation of a model.
"""
