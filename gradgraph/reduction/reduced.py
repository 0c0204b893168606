"""A model that shows a fault becomes a small one that still shows it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from gradgraph.arguments import FLAG, FUNCTION, NAMES, NUMBER, PATH, TEXT, checked
from gradgraph.errors import DataError, suggestion
from gradgraph.files.atomic import check_writable
from gradgraph.files.models import Source, load_model, save_model, to_proto
from gradgraph.files.protos import proto_nodes
from gradgraph.files.suffixes import check_suffix
from gradgraph.reduction.anonymous import ANONYMOUS, kept_weights
from gradgraph.reduction.kinds import FAULTS
from gradgraph.reduction.parts import Facts, learnt
from gradgraph.reduction.watched import VALUES, Command, observer
from gradgraph.reduction.ways import WAYS, in_turn, size_of

Observed = Callable[[onnx.ModelProto], str | None]


@dataclass(frozen=True)
class Reduction:
    """A small model, and how it was found.

    Attributes:
        model: the small model.
        fault: the kind of fault, a name of ``FAULTS`` or ``"test"``.
        seen: how it shows, without names and numbers of the model.
        nodes_before, nodes: how many nodes the model had, and has, with those in bodies.
        operators: how often each operator is there.
        tried: how many models were looked at.
        not_anonymous: weights without whose own numbers the fault does not show.
    """

    model: onnx.ModelProto
    fault: str
    seen: str
    nodes_before: int
    nodes: int
    operators: dict[str, int]
    tried: int
    not_anonymous: tuple[str, ...]


@checked(fault=TEXT, shows=FUNCTION.or_none(), test=NAMES.or_none(), out=PATH.or_none(), seconds=NUMBER,
         anonymous=FLAG, progress=FUNCTION)  # fmt: skip
def reduce(
    model: Source,
    *,
    fault: str = "auto",
    shows: Callable[[onnx.ModelProto], bool] | None = None,
    test: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    seconds: float = 60.0,
    anonymous: bool = True,
    progress: Callable[[int, int], None] = lambda nodes, size: None,
) -> Reduction:
    """Shrink ``model`` as far as a fault still shows, for a report that says nothing of where it comes from.

    Nodes, outputs, branches, sizes and weights are left out or made smaller by delta debugging (Zeller and Hildebrandt,
    "Simplifying and isolating failure-inducing input", 2002), again and again until nothing changes.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed. Its weights must fit into one
            message (2 GB).
        fault: how it shows. ``"build"``: its gradients cannot be written. ``"run"``: onnxruntime refuses the model,
            ends, or computes something else than the reference implementation. ``"gradient-run"``: the same of its
            gradients. ``"gradient"``: a gradient differs from central differences. ``"auto"``: the first of these that
            shows. Each is looked for in a process of its own.
        shows: your own judge of a model, run in this process, instead of ``fault``.
        test: a command that ends with 0 where the fault shows, as a list of words, instead of ``fault``; ``{}`` stands
            for the path of the model.
        out: write the small model to this path.
        seconds: of the processor, after which looking at one model ends; that is a fault, too.
        anonymous: replace names, texts and weights, as far as the fault still shows.
        progress: called with the nodes and the bytes of the smallest model so far.

    Raises:
        DataError: no fault shows, or there is no such fault.
        ModelError: there is no model.
        OutputError: ``out`` cannot be written.
    """
    if out is not None:
        check_suffix(out, ".onnx")
        check_writable(out)
    original = _message(model)
    with (
        _observed(original, fault, shows, test, seconds) as (kind, seen, look),
        observer(VALUES, seconds) as values,
    ):
        seen_before: dict[bytes, bool] = {}

        runs = True

        def learn(candidate: onnx.ModelProto) -> Facts:
            nonlocal runs
            found = values(candidate) if runs else None
            facts = learnt(candidate, found)
            runs = found is None or facts.ran  # what ends the process, or takes for ever, is not run again
            return facts

        def still(candidate: onnx.ModelProto) -> bool:
            key = hashlib.sha256(candidate.SerializeToString(deterministic=True)).digest()
            if key not in seen_before:
                seen_before[key] = _is_whole(candidate) >= whole and look(candidate) == seen
            if seen_before[key]:
                progress(*size_of(candidate))
            return seen_before[key]

        whole = _is_whole(original)
        small, before = original, (0, 0)
        while size_of(small) != before:
            before = size_of(small)
            small = in_turn(small, WAYS, still, learn)
        if anonymous:
            small = in_turn(small, ANONYMOUS, still, learn)
    if out is not None:
        save_model(small, out)
    operators = Counter(n.op_type for n in proto_nodes(small.graph.node))
    kept = tuple(kept_weights(small, original)) if anonymous else ()
    return Reduction(
        small, kind, seen, size_of(original)[0], size_of(small)[0], dict(operators), len(seen_before), kept
    )


def _message(model: Source) -> onnx.ModelProto:
    """A message with the weights inside."""
    if isinstance(model, onnx.ModelProto):
        own = onnx.ModelProto()
        own.CopyFrom(model)
        return own
    return to_proto(load_model(model))


def _is_whole(model: onnx.ModelProto) -> int:
    """How well formed a model is: 2 if types fit as well, 1 if the message does, else 0. It must not get worse."""
    try:
        onnx.checker.check_model(model)
    except Exception:  # whatever the checker stumbles over
        return 0
    with contextlib.suppress(Exception):
        onnx.shape_inference.infer_shapes(model, strict_mode=True)
        return 2
    return 1


@contextlib.contextmanager
def _observed(
    model: onnx.ModelProto,
    fault: str,
    shows: Callable[[onnx.ModelProto], bool] | None,
    test: Sequence[str] | None,
    seconds: float,
) -> Iterator[tuple[str, str, Observed]]:
    """The fault that ``model`` has, how it shows, and how to look for it."""
    if shows is not None and test is not None:
        raise DataError("shows= and test= are two judges; give one of them")
    if shows is not None:
        judge = shows
        yield "test", *_first(model, lambda candidate: "the test says so" if judge(candidate) else None, "the test")
        return
    if test is not None:
        with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
            yield "test", *_first(model, Command([*test], seconds, Path(folder)), "the test")
        return
    if fault not in ("auto", *FAULTS):
        raise DataError(f"there is no fault '{fault}'; use auto, {', '.join(FAULTS)}{suggestion(fault, FAULTS)}")
    for kind in FAULTS if fault == "auto" else (fault,):
        with observer(kind, seconds) as look:
            seen = look(model)
            if seen is not None:
                yield kind, seen, look
                return
    what = "none of the faults that are looked for" if fault == "auto" else f"no fault of the kind '{fault}'"
    raise DataError(
        f"the model shows {what}",
        remedy="give shows= or test=, a judge of your own",
        shell="add --test 'COMMAND {}', a command that ends with 0 where the fault shows",
    )


def _first(model: onnx.ModelProto, look: Observed, what: str) -> tuple[str, Observed]:
    seen = look(model)
    if seen is None:
        raise DataError(f"{what} does not say that the model shows a fault; look at what it does with the whole model")
    return seen, look
