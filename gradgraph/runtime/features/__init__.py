"""Computation of frozen layers once for each sample: the choice of values, the cut of the step, and the storage."""
