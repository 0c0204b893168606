"""Frozen layers computed once for each sample: which values, where to cut the step, and where they are kept."""
