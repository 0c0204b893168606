"""Kinds of adapters: each file has one, with its formula, its merge and its row in the table ``KINDS``."""
