"""Users' data become batches that a step takes."""
