"""Some of a run outlives it: its record, its history, its checkpoints."""
