"""Requirements that a file written for a backend has on the machine that runs it, recorded in its metadata."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph.backends.backend import Backend
from gradgraph.errors import RuntimeUnavailableError, shown

BACKEND_KEY = "gradgraph.backend"  # metadata key of a transformed model that does not run everywhere


def mark(model: ir.Model, backend: Backend) -> None:
    """Record in the metadata of ``model`` which backend and hardware it requires, if any."""
    model.metadata_props.pop(BACKEND_KEY, None)
    if backend.only_there:
        said = (backend.name, backend.machine(), backend.needs)
        model.metadata_props[BACKEND_KEY] = ", ".join(filter(None, said))


def check_runs_here(backend: Backend, machine: str, here: Backend) -> None:
    """Check that a step written for ``backend`` and the hardware ``machine`` runs on ``here``, this machine's backend.

    Raises:
        RuntimeUnavailableError: if the step was written for another provider or processor.
    """
    remedy = "build the step again here, or for the backend 'auto', which runs everywhere"
    if backend.only_there and here.only_there and backend.provider != here.provider:
        wanted = f"the {(backend.provider or '').removesuffix('ExecutionProvider')} provider"
        raise RuntimeUnavailableError(f"this step was built for {backend.name} and runs on {wanted} only; {remedy}")
    if machine and machine != backend.machine():
        raise RuntimeUnavailableError(
            f"this step was built for a processor with {shown(machine)}, but this one has {backend.machine()}; {remedy}"
        )
