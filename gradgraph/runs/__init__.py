"""Runs of ``gradgraph train``: their options, the data and the step that these describe, and the files of a run.

The room imports from all rooms of data and training, and prints nothing: progress is logged by ``gradgraph.runs``.
"""
