"""Any data as a source of batches: what fit, evaluate and predict accept."""
