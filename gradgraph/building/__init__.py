"""``gg.build``: turns a model and options into a ``Step``; ``pipeline`` lists its stages in order. It knows losses,
metrics and optimizers by their interfaces only, and runs nothing.
"""
