"""Proof: gradients against central differences in float64, the kit that tries rules, ``gradgraph check``.

It draws numbers and runs sessions; cases lie with the rules, as data.
"""
