"""Gradient rules: the table, its helpers, and the rules, one file per family; ``families`` lists them.

A rule contains its operator's formula. It does not depend on the path, on which gradients are wanted, or on runtimes.
"""
