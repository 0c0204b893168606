"""Model files and weights on disk: read safely, written atomically.

It knows what a file may contain, but not what a model computes.
"""
