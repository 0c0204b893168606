"""Reduction of a model to a small one with the same fault (``gradgraph reduce``)."""

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
from gradgraph.errors import DataError, shown, suggestion
from gradgraph.files.atomic import check_writable
from gradgraph.files.models import Source, load_model, save_model, to_proto
from gradgraph.files.protos import copied, proto_nodes
from gradgraph.files.suffixes import check_suffix
from gradgraph.reduction.anonymous import ANONYMOUS, kept_weights
from gradgraph.reduction.kinds import FAULTS
from gradgraph.reduction.observer import VALUES, Command, observer
from gradgraph.reduction.strategies import STRATEGIES, apply_strategies, size_of
from gradgraph.reduction.submodels import Facts, learnt

Observed = Callable[[onnx.ModelProto], str | None]


@dataclass(frozen=True)
class Reduction:
    """The result of ``reduce``.

    Attributes:
        model: the small model.
        fault: the kind of fault, a name of ``FAULTS`` or ``"test"``.
        seen: the symptom of the fault, without names and numbers of the model.
        nodes_before, nodes: the number of nodes before and after, including nodes in bodies.
        operators: the number of nodes of each operator.
        tried: the number of models that were checked.
        not_anonymous: the weights that keep their original values, because the fault disappears otherwise.
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
    """Reduce ``model`` to a small, anonymous model with the same fault, for a bug report.

    Nodes, outputs, branches, sizes and weights are dropped or made smaller by delta debugging (Zeller and Hildebrandt,
    "Simplifying and isolating failure-inducing input", 2002), until no further reduction keeps the fault.

    Args:
        model: a path, an ``onnx.ModelProto`` or an ``onnx_ir.Model``; it is not changed. Its weights must fit into one
            message (2 GB).
        fault: the kind of fault. ``"build"``: gradients cannot be written. ``"run"``: onnxruntime rejects the model,
            crashes, or differs from the reference implementation. ``"gradient-run"``: the same for its gradients.
            ``"gradient"``: a gradient differs from central differences. ``"auto"``: the first of these that the model
            has. The check runs in a subprocess.
        shows: your own check, used instead of ``fault``: returns whether a model has the fault; runs in this process.
        test: a command, used instead of ``fault``, as a list of words: it exits with 0 if the model has the fault.
            ``{}`` is replaced by the path of the model.
        out: the path to which the small model is written; by default it is not written.
        seconds: the CPU time limit for checking one model; exceeding it is a fault, too.
        anonymous: replace names, texts and weights if the fault remains.
        progress: called with the number of nodes and the bytes of the smallest model so far.

    Raises:
        DataError: if the model does not have the fault, or ``fault`` is unknown.
        ModelError: if the model does not exist.
        OutputError: if ``out`` cannot be written.
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
            runs = found is None or facts.ran  # a model that crashed or timed out is not run again
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
            small = apply_strategies(small, STRATEGIES, still, learn)
        if anonymous:
            small = apply_strategies(small, ANONYMOUS, still, learn)
    if out is not None:
        save_model(small, out)
    operators = Counter(n.op_type for n in proto_nodes(small.graph.node))
    kept = tuple(kept_weights(small, original)) if anonymous else ()
    return Reduction(
        small, kind, seen, size_of(original)[0], size_of(small)[0], dict(operators), len(seen_before), kept
    )


def _message(model: Source) -> onnx.ModelProto:
    """Return a copy of ``model`` as a protobuf message with all weights inside."""
    if isinstance(model, onnx.ModelProto):
        return copied(model)
    return to_proto(load_model(model))


def _is_whole(model: onnx.ModelProto) -> int:
    """Return how valid a model is: 0 if invalid, 1 if the message is valid, 2 if types and shapes match, too."""
    try:
        onnx.checker.check_model(model)
    except Exception:  # the checker may raise anything
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
    """Yield the kind of ``model``'s fault, its symptom, and a function that checks another model for it.

    Arguments and errors are those of :func:`reduce`. The context ends the check's subprocess.
    """
    if shows is not None and test is not None:
        raise DataError("shows and test cannot be combined; pass one of them")
    if shows is not None:
        judge = shows
        yield "test", *_first(model, lambda candidate: "the test says so" if judge(candidate) else None, "the test")
        return
    if test is not None:
        with tempfile.TemporaryDirectory(prefix="gradgraph-") as folder:
            yield "test", *_first(model, Command([*test], seconds, Path(folder)), "the test")
        return
    if fault not in ("auto", *FAULTS):
        raise DataError(f"there is no fault '{shown(fault)}'{suggestion(fault, ('auto', *FAULTS))}")
    for kind in FAULTS if fault == "auto" else (fault,):
        with observer(kind, seconds) as look:
            seen = look(model)
            if seen is not None:
                yield kind, seen, look
                return
    what = "none of the known faults" if fault == "auto" else f"no fault of the kind '{fault}'"
    raise DataError(
        f"the model shows {what}",
        remedy="give your own check as shows= or test=",
        shell="add --test 'COMMAND {}', a command that exits with 0 if the fault shows",
    )


def _first(model: onnx.ModelProto, look: Observed, what: str) -> tuple[str, Observed]:
    seen = look(model)
    if seen is None:
        raise DataError(f"{what} does not report a fault of the original model; pass a test that does")
    return seen, look
