"""Verification: gradients against central differences in float64, the kit that tests rules, ``gradgraph check``.

It draws random numbers and runs sessions; test cases are stored with the rules, as data.
"""
