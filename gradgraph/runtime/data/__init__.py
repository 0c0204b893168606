"""What users have, as batches that a step takes."""
