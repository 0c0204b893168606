"""Training of recurrent layers: forward loops that save what backward loops need."""
