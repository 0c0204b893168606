"""The record of the training data: names of columns and classes, and how images, texts and sounds are read."""
