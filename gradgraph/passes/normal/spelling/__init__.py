"""Canonical spelling of what a file may write in several ways: one pass each."""
