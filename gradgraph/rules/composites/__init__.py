"""Composites: functions that exporters write as several nodes. Each file finds some in a graph, and has their rules."""
