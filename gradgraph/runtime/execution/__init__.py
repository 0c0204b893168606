"""Running a step: sessions, the state bound to them, evaluation and prediction."""
