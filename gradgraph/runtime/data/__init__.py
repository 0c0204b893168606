"""Conversion of users' data to batches."""
