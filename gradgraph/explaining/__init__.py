"""Explanations of single predictions, attacks and inverse problems, as ONNX models.

``along`` evaluates a model at many points, ``iterate`` updates an input by its gradient; the methods of ``explain`` are
compositions of them, a few lines each. The room may import everything that builds a model (``transforms``,
``building``, ``optim``), and nothing that runs one.
"""
