"""Explanations of single predictions, attacks, inverse problems and uncertainty, as ONNX models.

``along`` evaluates a model at many points, ``iterate`` updates an input by its gradient; the methods of ``explain`` are
compositions of them, a few lines each. ``laplace`` and ``tracin`` also run a model on data. The room may import
everything except the rooms that show results to people.
"""
