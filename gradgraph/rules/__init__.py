"""Gradient rules: the table, its helpers, and the rules, one file per family; ``families`` lists them.

A rule knows its operator's formula, but not the path, which gradients are wanted, or runtimes.
"""
