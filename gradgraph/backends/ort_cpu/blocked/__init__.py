"""Nodes between blocked convolutions: which of them also compute in blocks of channels (NCHWc), and how."""
