"""Model files and weights on disk: read safely, written atomically, whole or not at all.

It knows what a file may contain, and nothing of what a model computes.
"""
