"""Gradient rules: the table, its language, and the rules, a file a family; ``families`` lists these.

A rule knows its operator's formula, and nothing of paths, of who asks for a gradient, or of runtimes.
"""
