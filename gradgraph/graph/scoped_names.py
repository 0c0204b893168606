"""Names of new values: ``scope/name``, shortened for deeply nested scopes."""

from __future__ import annotations

LONGEST = 120  # maximum characters of a composed name, which would otherwise double with each level of nesting
LEFT_OUT = "/../"

# the domain of the model-local functions that stand for named operators in a saved step
DOMAIN = "gradgraph"
VERSION = 1


def scoped(scope: str, name: str) -> str:
    """Return ``scope/name``, such as ``grad/conv/Mul``.

    Leading scopes that ``name`` shares with ``scope`` are not repeated. If the result is too long, scopes in the middle
    are dropped.
    """
    return _shortened(f"{scope}/{_beyond(scope, name)}" if scope else name)


def _beyond(scope: str, name: str) -> str:
    """Return ``name`` without the scopes that it shares with ``scope``."""
    shared = 0
    for a, b in zip(scope.split("/"), name.split("/")[:-1], strict=False):
        if a != b:
            break
        shared += len(a) + 1
    return name[shared:]


def _shortened(name: str) -> str:
    if len(name) <= LONGEST:
        return name
    head = name[: LONGEST // 2].split("/", 1)[0]
    tail = name[len(head) + len(LEFT_OUT) - LONGEST :]
    return head + LEFT_OUT + (tail.split("/", 1)[-1] or tail)


def function_name(operator: str, number: int) -> str:
    """Return the name of the ``number``-th function of an operator: ``ConvGradWeight``, ``ConvGradWeight_2``, …"""
    return operator if number == 1 else f"{operator}_{number}"


def operator_name(function: str, domain: str = DOMAIN) -> str:
    """Return the operator of a function named by ``function_name``; the name of any other function is unchanged."""
    name, _, number = function.rpartition("_")
    return name if domain == DOMAIN and number.isdecimal() else function
