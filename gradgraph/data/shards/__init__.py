"""Shards: tar files of samples, read in order or at random."""
