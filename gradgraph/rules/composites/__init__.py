"""Composites: functions that exporters write as several nodes.

Each file defines composites of one kind: the patterns that match them in a graph, and their gradient rules.
"""
