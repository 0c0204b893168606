"""What a step needs to run: sessions, the state bound to them, evaluation and prediction."""
