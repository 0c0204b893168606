"""Convolutions and their gradients: ``conv_forms`` sets the order of forms, each ``conv_*`` file has one method."""
