"""Convolutions and their gradients: ``conv_forms`` is the table, each ``conv_*`` file one method."""
