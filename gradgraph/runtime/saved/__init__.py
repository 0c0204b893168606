"""Files saved by a run: checkpoints with progress, history, and locks."""
