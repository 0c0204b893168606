"""Gradient rules of operators: the table of rules, and one file of rules per family of operators (see ``families``).

A rule contains the formula of its operator. It does not depend on the rest of the model, on which gradients are
requested, or on the runtime.
"""
