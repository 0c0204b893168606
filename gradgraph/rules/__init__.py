"""Gradient rules of operators: the rule table, and one file of rules per operator family (see ``families``).

A rule contains the derivative formula of its operator. It does not depend on the rest of the model, on which gradients
are requested, or on the runtime.
"""
