"""Checks that moving code does not change a byte of written models.

    python -m tests.kit.moves record before.json      # before the change (networks need torch; exports stay in build/)
    python -m tests.kit.moves compare before.json     # after it: prints differences by name; exit code 1 if any

It compares digests of the saved steps of the benchmark's eight networks for every backend, of their lowered training
and evaluation graphs (with known and unknown sizes, with and without tiles), of the gradients and tangents of every
rule case for every backend, and of every form of a backend where it is applicable.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import onnx

import gradgraph as gg
import gradgraph.rules.families
from benchmarks.workloads import WORKLOADS
from gradgraph.backends import BACKENDS, step_backends
from gradgraph.backends.backend import Backend
from gradgraph.backends.engine import for_machine
from gradgraph.backends.forms import Form
from gradgraph.backends.ort_native.library import Library
from gradgraph.errors import GradgraphError
from gradgraph.rules.registry import RULES
from gradgraph.verify import cases
from tests.kit import form_kit

Digests = dict[str, str]
Job = tuple[Callable[..., Iterator[tuple[str, str]]], tuple[object, ...]]
EXPORTS = Path("build/moves")
LOWERED = [name for name, backend in BACKENDS.items() if not backend.keeps_functions]


def digest(model: onnx.ModelProto) -> str:
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()[:16]


def outcome(make: Callable[[], onnx.ModelProto | None]) -> str:
    """Return the digest of the model that ``make`` returns, or the error that it raises."""
    try:
        made = make()
    except GradgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing" if made is None else digest(made)


@contextlib.contextmanager
def tiles(there: bool) -> Iterator[None]:
    """Lower in this context as for a processor with AMX (``there``) or without it; the models are not run."""
    with mock.patch.object(Library, "has_tiles", there):
        yield


# --- networks -----------------------------------------------------------------------------------------------


def export(name: str) -> dict[str, Path]:
    """Return the paths of a network with fixed sizes and with a symbolic batch size, exported once."""
    import torch

    from benchmarks import networks
    from gradgraph.frontend import from_torch

    paths = {kind: EXPORTS / f"{name}-{kind}.onnx" for kind in ("fixed", "open")}
    for kind, path in paths.items():
        if not path.exists():
            x = torch.from_numpy(WORKLOADS[name].batch()["x"])
            fixed = {"dynamic": {}} if kind == "fixed" else {}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(0)
            onnx.save(from_torch(networks.make(name), x, input_names=["x"], output_names=["logits"], **fixed), path)
    return paths


def of_network(name: str) -> Iterator[tuple[str, str]]:
    for kind, path in export(name).items():
        for optimizer, backend in itertools.product(("adamw", "sgd"), step_backends()):
            key = f"{name} {kind} {optimizer} {backend}"
            try:
                step = gg.build(path, "cross_entropy", optimizer, backend=backend)
            except GradgraphError as refused:  # the backend does not support the network
                yield key, str(refused)
                continue
            yield from ((f"{key}: {file}", value) for file, value in saved(step))
            if backend == "auto":
                yield from lowered(key, step, {"batch": len(WORKLOADS[name].batch()["x"])})


def saved(step: gg.Step) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(step.save(Path(folder) / "step").iterdir()):
            yield file.name, hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def lowered(key: str, step: gg.Step, sizes: dict[str, int]) -> Iterator[tuple[str, str]]:
    for backend, there in (*((b, False) for b in LOWERED), ("ort-cpu-native", True)):
        with tiles(there):
            for what, dims in (("sizes known", sizes), ("sizes open", {})):
                model = for_machine(step.train, BACKENDS[backend], dims)
                yield f"{key}: train for {backend}, tiles {there}, {what}", digest(model)
            yield f"{key}: eval for {backend}, tiles {there}", digest(for_machine(step.eval, BACKENDS[backend]))


def every_form() -> list[tuple[Backend, Form]]:
    return [(backend, form) for backend in BACKENDS.values() for form in backend.lowering.forms]


# --- operators ----------------------------------------------------------------------------------------------


def of_rule(key: tuple[str, str]) -> Iterator[tuple[str, str]]:
    rule = RULES[key]
    for i, case in enumerate(rule.cases):
        for unknown in (False, True):
            trial = cases.trial(rule, case, unknown=unknown, dtype=cases.np.float32)
            for backend, (transform, of) in itertools.product(
                BACKENDS, ((gg.vjp, {"outputs": trial.read}), (gg.jvp, {}))
            ):
                made = outcome(
                    functools.partial(transform, trial.model, **of, wrt=trial.wrt, allow_unused=True, backend=backend)
                )
                yield f"{transform.__name__} of {'/'.join(key)} {i}{' open' if unknown else ''} for {backend}", made


def of_form(index: int) -> Iterator[tuple[str, str]]:
    backend, form = every_form()[index]
    own = form_kit.OPERATORS[form.op_type].cases if form.domain == form_kit.DOMAIN else ()
    for (i, case), unknown in itertools.product(enumerate((*form.cases, *own)), (False, True)):
        model, _ = form_kit.one_call(form.domain, form.op_type, case, unknown)
        name = f"form {form.op_type} {form.name} of {backend.name}, case {i}{' open' if unknown else ''}"
        yield name, outcome(lambda m=model: form_kit.lowered_with(m, backend, form))


# --- both ---------------------------------------------------------------------------------------------------


def jobs(parts: Iterable[str]) -> Iterator[Job]:
    if "networks" in parts:
        yield from ((of_network, (name,)) for name in WORKLOADS)
    if "rules" in parts:
        yield from ((of_rule, (key,)) for key in RULES)
    if "forms" in parts:
        yield from ((of_form, (i,)) for i in range(len(every_form())))


def run(job: Job) -> Digests:
    function, arguments = job
    return dict(function(*arguments))


def main() -> int:
    logging.getLogger("gradgraph").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(prog="python -m tests.kit.moves", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=("networks", "rules", "forms"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    found: Digests = {}
    with multiprocessing.Pool(given.jobs, maxtasksperchild=8) as pool:
        for part in pool.imap_unordered(run, list(jobs(given.only)), chunksize=1):
            found |= part
    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=0, sort_keys=True))
        print(f"{len(found):,} digests")
        return 0
    before = json.loads(given.file.read_text())
    differ = sorted(k for k in found.keys() & before if before[k] != found[k])
    for key in differ[:50]:
        print(f"{key}: {before[key]} became {found[key]}")
    new, gone = found.keys() - before, before.keys() - found
    print(f"{len(found):,} digests: {len(differ):,} differ, {len(new):,} are new, {len(gone):,} are not made any more")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
