"""Explanations of the predictions for data: attributions by unit, their sanity checks, and the page that shows them.

``gg.explain`` returns a model that computes attributions. This room runs it on samples and groups the attributions by
what people see: pixels, tokens, table columns, sections of a sound. It may use everything except the command line.
"""
