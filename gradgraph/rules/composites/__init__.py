"""Composites: functions that exporters write as several nodes.

Each file defines some composites: how they are found in a graph, and their gradient rules.
"""
