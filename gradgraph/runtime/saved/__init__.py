"""The saved output of a run: its checkpoints, progress record and history."""
