"""Composites: functions that exporters write as several nodes. Each file says how they are found, and their rule."""
