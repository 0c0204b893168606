"""Names of values in the artifacts, as in onnxruntime-training."""

from __future__ import annotations

RESET = "lazy_reset_grad"
UPDATED = "updated_flag"
LEARNING_RATE, STEP = "learning_rate", "step"

_BUFFER = "_grad.accumulation.buffer"
_OUT = "_grad.accumulation.out"
_NEXT = ".next"


def buffer(parameter: str) -> str:
    """Name of the accumulated gradients, as an input."""
    return parameter + _BUFFER


def accumulated(parameter: str) -> str:
    """Name of the accumulated gradients including this batch, as an output: the next buffer."""
    return parameter + _OUT


def parameter_of_buffer(name: str) -> str | None:
    return name[: -len(_BUFFER)] if name.endswith(_BUFFER) else None


def parameter_of_accumulated(name: str) -> str | None:
    return name[: -len(_OUT)] if name.endswith(_OUT) else None


def moment(parameter: str, slot: str) -> str:
    return f"{parameter}.{slot}"


def following(name: str) -> str:
    """Name of the output that is the next value of a state tensor."""
    return name + _NEXT
