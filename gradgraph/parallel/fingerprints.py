"""Digests with which ranks check that they have the same step and the same state."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

import numpy as np
import onnx

from gradgraph.data.arrays.batch import Array
from gradgraph.files.digest import digest_of
from gradgraph.files.external import Entry, external_entry, is_external, point_at
from gradgraph.files.protos import copied
from gradgraph.step.step import Step


def digest_of_step(step: Step) -> str:
    """Return a digest of manifest, graphs and frozen weights of ``step``.

    Initial weights do not count, since rank 0 sends them to all ranks, nor does it matter where the weights are stored.
    """
    digest = hashlib.sha256(step.manifest.to_json().encode())
    known = dict[Entry, str]()
    for model in (step.eval, *step.separate.values()):
        digest.update(_with_contents(step, model, known).SerializeToString(deterministic=True))
    return digest.hexdigest()[:12]


def _with_contents(step: Step, model: onnx.ModelProto, known: dict[Entry, str]) -> onnx.ModelProto:
    """Return ``model`` with digests in place of the paths and offsets of external weights; ``known`` is a cache."""
    if not any(map(is_external, model.graph.initializer)):
        return model
    slim: onnx.ModelProto = copied(model)
    for tensor in filter(is_external, slim.graph.initializer):
        entry = external_entry(tensor)
        if entry not in known:
            known[entry] = digest_of(step.pieces(tensor))
        tensor.ClearField("external_data")
        point_at(tensor, known[entry], 0, entry.length)
    return slim


def digest_of_state(state: Mapping[str, Array]) -> int:
    """Return a checksum of all tensors in ``state``, computed from sums of 64-bit words at memory speed."""
    found = 0
    for array in state.values():
        flat = array.reshape(-1).view(np.uint8)
        words = flat[: len(flat) // 8 * 8].view(np.uint64)
        with np.errstate(over="ignore"):
            sums = int(words.sum()), int(np.bitwise_xor.reduce(words)) if len(words) else 0
        found = zlib.crc32(repr((found, sums, flat[len(words) * 8 :].tobytes())).encode())
    return found
