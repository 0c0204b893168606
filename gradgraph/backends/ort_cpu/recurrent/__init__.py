"""Training of recurrent layers: forward loops that save values for backward loops."""
