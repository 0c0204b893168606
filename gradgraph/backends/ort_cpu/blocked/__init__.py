"""Nodes between blocked convolutions: which of them compute in blocks of channels (NCHWc), too, and how."""
