"""Ranks open a step twice: ``python ranks_openings.py FOLDER``; what each rank has found goes to FOLDER/<rank>.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph.runtime.execution import opener, openings, step_session
from tests.parallel.ranks_cases import data, mlp, normed, pictures

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "in place": ({}, {"in_place": True}),
    "shared state": ({"shard_state": True}, {}),
    "joint norms": ({"sync_batch_norm": True}, {}),
}


def trained(kind: str) -> dict[str, str]:
    """Digits of the state after a few steps of shuffled rows."""
    ways, options = KINDS[kind]
    model, rows = (normed(True), pictures()) if "sync_batch_norm" in ways else (mlp(), data(np.float32))
    step = gg.build(model, optimizer=gg.optim.chain(gg.optim.clip_by_global_norm(1.0), gg.optim.adamw(0.01)))
    chosen = gg.RuntimeOptions(threads=1, **options)
    own = gg.Trainer(step, device="cpu", seed=3, options=chosen, parallel=gg.DataParallel(check_every=1, **ways))
    own.fit(rows, 2, 10, progress=False)
    return {name: np.asarray(value).tobytes().hex() for name, value in own.state_dict().items()}


def packed() -> list[bool]:
    """Whether each session may pack frozen weights, where these are many: for the usual batches, then for others."""
    told, usual, least = [], opener.create_session, step_session.LEAST_PASSED

    def listening(*given: Any, packs: bool = True, **options: Any) -> Any:
        told.append(packs)
        return usual(*given, packs=packs, **options)

    opener.create_session, step_session.LEAST_PASSED = listening, 0
    own = gg.Trainer(gg.build(mlp()), device="cpu", parallel=gg.DataParallel())
    own.fit(data(np.float32, rows=26), 1, 10, progress=False)
    opener.create_session, step_session.LEAST_PASSED = usual, least
    return told


def main(folder: Path) -> None:
    openings.LEAST = 0
    usual = opener.for_machine
    count = 0

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return usual(*given)

    opener.for_machine = counted
    found = {}
    for kind in KINDS:
        os.environ["GRADGRAPH_OPENINGS"] = "off"
        states, counts = [trained(kind)], []
        os.environ["GRADGRAPH_OPENINGS"] = ""
        for _ in range(2):
            before = count
            states.append(trained(kind))
            counts.append(count - before)
        found[kind] = {"same": states[0] == states[1] == states[2], "again": counts[1], "kept": openings.kept()[0]}
    found["packed"] = {"sessions": packed()}
    rank = gg.DataParallel().rank
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
