"""The kinds of adapters: each file holds one, with its formula, its merge and its row in the table ``KINDS``."""
