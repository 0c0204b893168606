"""Arrays as rows of a batch: NumPy files, checks and conversions, padding."""
