"""Composites: functions that exporters write as several nodes. Each file defines how one is found, and its rule."""
