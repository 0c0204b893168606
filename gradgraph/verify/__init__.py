"""Verification: gradients against central differences in float64, the kit that tests rules, ``gradgraph check``.

This package may draw random numbers and run sessions. Test cases are data, stored with the rules.
"""
