"""Canonical forms of equivalent spellings: one pass each."""
