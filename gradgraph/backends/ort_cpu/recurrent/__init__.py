"""Recurrent layers that are trained: loops forward that keep what the loops backwards need."""
