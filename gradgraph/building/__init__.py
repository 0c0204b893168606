"""``gg.build``, which turns a model and options into a ``Step``; ``pipeline`` lists its stages in order.

This package uses losses, metrics and optimizers through their interfaces only, and runs no model.
"""
