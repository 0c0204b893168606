"""Execution of steps: sessions with bound state, evaluation and prediction."""
