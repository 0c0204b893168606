"""A check that values are those of a state: of every tensor one, of its shape and type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradgraph.errors import CheckpointError, listed, shown
from gradgraph.runtime.data.batch import to_array
from gradgraph.step.manifest import StateSpec, numpy_dtype


def check_values(specs: Mapping[str, StateSpec], values: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Raise CheckpointError unless ``values`` are exactly the state that ``specs`` describe."""
    unknown = [name for name in values if name not in specs]
    if unknown:
        raise CheckpointError(
            f"the state has {listed(unknown)}, which this step does not know; load it into the step that it was saved "
            "from"
        )
    missing = [name for name in specs if name not in values]
    if missing:
        raise CheckpointError(f"the state lacks {listed(missing)}; load one that this step has saved")
    for name, spec in specs.items():
        value = to_array(name, values[name])
        if value.shape != spec.shape or value.dtype != numpy_dtype(spec.dtype):
            raise CheckpointError(
                f"'{shown(name)}' is {value.dtype}{list(value.shape)} in the state, but {spec.dtype}{list(spec.shape)} "
                "in this step; load it into the step that it was saved from"
            )
