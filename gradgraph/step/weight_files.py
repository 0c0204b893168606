"""Files of weights next to the models of a step, or shared by it: opening them, and comparing them with the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradgraph.errors import ModelError, shown
from gradgraph.files.held_files import HeldFile
from gradgraph.files.untrusted.regular import open_regular, reason_of
from gradgraph.step.manifest import DIGESTS


def weight_file(path: Path, digest: str | None, refusal: Callable[[Path], ModelError] | None = None) -> HeldFile:
    """Open a file of weights.

    Args:
        path: the file.
        digest: the expected digest, if known; checking it reads the file once.
        refusal: returns the error for a file with a different digest; by default :func:`not_as_saved`.

    Raises:
        ModelError: if the file cannot be read, or has a different digest.
    """
    try:
        with open_regular(path) as file:
            held = HeldFile(path, file, own=False)  # even if another file replaces it under its path meanwhile
            if digest is not None and held.digest() != digest:
                raise (refusal or not_as_saved)(path)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot read '{shown(path)}', which contains weights of a step ({reason_of(error)}); restore it, or build "
            "the step again"
        ) from None
    return held


def not_as_saved(path: Path) -> ModelError:
    return ModelError(
        f"'{shown(path)}' has a different digest from the one in the manifest.json of its folder, so it was damaged "
        "or edited; build the step again (or remove its entry under "
        f'"{DIGESTS}" in manifest.json if you edited the file)'
    )
