"""Composites: functions that exporters write as several nodes. Each file defines how they are found, and their rule."""
