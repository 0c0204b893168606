"""Drop-in replacements for discontinued packages, built on this package and stock runtimes.

They use the public interface of this package; nothing in it depends on them.
"""
