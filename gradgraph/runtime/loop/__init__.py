"""The loop behind ``Trainer.fit``."""
