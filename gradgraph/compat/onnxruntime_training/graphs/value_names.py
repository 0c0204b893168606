"""Names of values in the artifacts, as in onnxruntime-training."""

from __future__ import annotations

RESET = "lazy_reset_grad"
UPDATED = "updated_flag"
LEARNING_RATE, STEP = "learning_rate", "step"

_BUFFER = "_grad.accumulation.buffer"
_OUT = "_grad.accumulation.out"
_NEXT = ".next"


def buffer(parameter: str) -> str:
    """Return the name of the input for the parameter's gradient accumulated over previous batches."""
    return parameter + _BUFFER


def accumulated(parameter: str) -> str:
    """Return the name of the output for the accumulated gradient including this batch, the next value of the buffer."""
    return parameter + _OUT


def parameter_of_buffer(name: str) -> str | None:
    return name[: -len(_BUFFER)] if name.endswith(_BUFFER) else None


def parameter_of_accumulated(name: str) -> str | None:
    return name[: -len(_OUT)] if name.endswith(_OUT) else None


def moment(parameter: str, slot: str) -> str:
    return f"{parameter}.{slot}"


def following(name: str) -> str:
    """Return the name of the output that is the next value of a state tensor."""
    return name + _NEXT
