"""``gg.build``: from a model and options to a ``Step``; ``pipeline`` has its stages in order.

It knows losses, metrics and optimizers by their faces; it runs nothing.
"""
