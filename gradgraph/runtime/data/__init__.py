"""Conversion of user data to batches: arrays, tables, images, shards and datasets."""
