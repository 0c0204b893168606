"""Model files and weights on disk: read safely, written atomically.

This room checks the contents of files; other rooms interpret the computation of a model.
"""
