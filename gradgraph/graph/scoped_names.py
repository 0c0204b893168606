"""Names of what is written: the scope that it is written in, then its own; short, however deep scopes lie in scopes."""

from __future__ import annotations

LONGEST = 120  # characters of a name made of others; a name in a name would double with each level of nesting
LEFT_OUT = "/../"

# how a saved step calls named operators: as functions of this domain
DOMAIN = "gradgraph"
VERSION = 1


def scoped(scope: str, name: str) -> str:
    """``scope/name``: ``grad/conv/Mul``.

    Scopes in front of ``name`` that ``scope`` begins with are not said twice; of what is too long, scopes in the middle
    are left out.
    """
    return _shortened(f"{scope}/{_beyond(scope, name)}" if scope else name)


def _beyond(scope: str, name: str) -> str:
    """``name`` without the scopes that it shares with ``scope``."""
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
    """The name of the ``number``-th function of an operator: ``ConvGradWeight``, ``ConvGradWeight_2``, …"""
    return operator if number == 1 else f"{operator}_{number}"


def operator_name(function: str, domain: str = DOMAIN) -> str:
    """The operator that a function of ours stands for; any other name stays as it is."""
    name, _, number = function.rpartition("_")
    return name if domain == DOMAIN and number.isdecimal() else function
