"""Random walks from data to a model in use, held against laws in NumPy, pandas and scikit-learn."""
