"""Drop-in replacements for discontinued packages, built on gradgraph and stock runtimes.

They use gradgraph's public interface; no other package depends on them.
"""
