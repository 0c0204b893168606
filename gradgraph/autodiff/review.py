"""Review of the selected weights: findings about likely mistakes, and the reason why each tensor is trained or not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

import onnx_ir as ir

from gradgraph.autodiff.attention_weights import weights_of_attentions
from gradgraph.autodiff.path import Path, carries
from gradgraph.autodiff.select import running_statistics
from gradgraph.errors import Finding, counted, listed, shown
from gradgraph.graph.marks import is_marked_constant
from gradgraph.graph.nodes import is_standard, made_by
from gradgraph.passes.normal.weights.folded import Copy, find_copies
from gradgraph.passes.normal.weights.frozen_norms import find_frozen_norms
from gradgraph.passes.normal.weights.saturating import find_saturating
from gradgraph.passes.normal.weights.stored_once import find_merged, modules_of
from gradgraph.passes.normal.weights.verdicts import (
    OURS,
    exporter_of,
    has_generated_name,
    is_buffer,
    is_named_state,
    verdicts,
    without_folding,
)

log = logging.getLogger("gradgraph")

_NAMED = 5  # maximum number of tensors listed in a sentence
_SAID = 5  # maximum number of findings that a build logs
_LEAST_NUMBERS = 1 << 14  # elements of a weight that counts as large (`_peers`)
_ARITHMETIC = frozenset({"Add", "Div", "Mul", "Sub"})
_RANDOM = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
                     "RandomUniformLike"})  # fmt: skip
_NARROW = 8  # bits of integers in which weights are stored
_TO_TRAIN = "name the tensors to train in full: train=['*', 'NAME'] (--train '*' --train NAME)"


def review(
    graph: ir.Graph, targets: Sequence[ir.Value], trained: Collection[str], by_default: bool = True
) -> list[Finding]:
    """Return warnings about a selection of weights to train. Warnings 1, 2, 3 and 6 are for the default selection only.

    1. only vectors and scalars are trained, although there are matrices;
    2. scalars that may have been learned are not trained;
    3. tensors are not trained because their readers or values suggest that they are constants, although no mark in the
       file confirms this;
    4. a tensor was computed from a weight when the file was written (``gradgraph.passes.normal.weights.folded``);
    5. weights of several modules were merged (``gradgraph.passes.normal.weights.stored_once``);
    6. a likely norm with fixed statistics is trained (``gradgraph.passes.normal.weights.frozen_norms``);
    7. a transformer from another tool has no Dropout, although its norms are trained.

    ``graph`` is in normal form, ``targets`` are the differentiated outputs, and ``trained`` names the selected tensors.
    """
    chosen = []
    if by_default:
        chosen = [
            *_trains_little(graph, targets, trained),
            *_doubtful(graph, trained),
            *_constants(graph, trained),
            *_frozen_norms(graph, trained),
        ]
    return [*chosen, *_computed_before(graph, trained), *_merged_weights(graph, trained), *_no_dropout(graph, trained)]


def log_findings(findings: Sequence[Finding]) -> None:
    """Log the first findings as warnings, and the number of the remaining ones."""
    for finding in findings[:_SAID]:
        log.warning("%s", finding)
    if len(findings) > _SAID:
        log.warning("%d more such notes: `gradgraph inspect` lists all of them", len(findings) - _SAID)


# --- reasons ------------------------------------------------------------------------------------------------


def reasons(graph: ir.Graph, targets: Sequence[ir.Value]) -> dict[str, str]:
    """Return, for each floating-point tensor in the file by name, the reason why it is or is not trained by default."""
    found = {name: verdict.reason for name, verdict in verdicts(graph).items()}
    statistics = running_statistics(graph)
    weights = [v for v in graph.initializers.values() if carries(v) and not is_marked_constant(v)]
    path = Path(graph, targets, [v for v in weights if v not in statistics])
    for value in weights:
        name = value.name or ""
        if value in statistics:
            found[name] = found[name] if is_buffer(value) and name in found else "it is a running statistic"
        elif value not in path.active or not path.has_reader(value):
            found[name] = path.where_it_ends(value)
        else:
            found.setdefault(name, "it is a weight that the operator stores in an attribute")
    return found


def left_out(graph: ir.Graph, targets: Sequence[ir.Value], trained: Collection[str]) -> str:
    """Return a phrase for a message: the names of the largest stored tensors that are not trained, with reasons."""
    why = reasons(graph, targets)
    stored = {n: v for n, v in graph.initializers.items() if n not in trained and (n in why or _is_packed(v))}
    largest = sorted(stored, key=lambda n: -_size(stored[n]))
    words = [f"'{shown(n)}' ({why.get(n) or _kind(stored[n])})" for n in largest[:_NAMED]]
    return ", ".join(words) + (f" and {len(largest) - _NAMED} more" if len(largest) > _NAMED else "")


def _kind(value: ir.Value) -> str:
    return "" if value.dtype is None else f"it has dtype {value.dtype.name.lower()}"


def _is_packed(value: ir.Value) -> bool:
    dtype, tensor = value.dtype, value.const_value
    return (
        dtype is not None
        and dtype.is_integer()
        and dtype.bitwidth <= _NARROW
        and (tensor is not None and tensor.size > 1)
    )


# --- findings -----------------------------------------------------------------------------------------------


def _trains_little(graph: ir.Graph, targets: Sequence[ir.Value], trained: Collection[str]) -> Iterator[Finding]:
    if not trained or any(_is_matrix(graph.initializers[n]) for n in trained):
        return
    others = [v for n, v in graph.initializers.items() if n not in trained and (carries(v) or _is_packed(v))]
    sizes = [_size(graph.initializers[n]) for n in trained]
    single = max(sizes) == 1
    if not others or not (single or any(map(_is_matrix, others))):
        return
    size = sum(sizes)
    yield Finding(
        "the step",
        f"trains {size:,} {'number' if size == 1 else 'numbers'} in {len(trained)} "
        f"{'tensor' if len(trained) == 1 else 'tensors'} and no matrix",
        f"excludes {left_out(graph, targets, trained)}",
        f"{_TO_TRAIN}; train quantized tensors before quantization",
        "warning",
    )


def _is_matrix(value: ir.Value) -> bool:
    return value.const_value is not None and len(value.const_value.shape) > 1 and value.const_value.size > 1


def _doubtful(graph: ir.Graph, trained: Collection[str]) -> Iterator[Finding]:
    names = [n for n, verdict in verdicts(graph).items() if verdict.doubtful and n not in trained]
    if not names:
        return
    one = len(names) == 1
    yield Finding(
        f"the {'scalar' if one else 'scalars'} {listed(names, _NAMED)}",
        f"{'is' if one else 'are'} not trained",
        f"the file does not say whether {'it was' if one else 'they were'} learned",
        f"if so, name {'it' if one else 'each of them'} in full: train=['*', '{shown(names[0])}'] "
        f"(--train '*' --train {shown(names[0])})",
        "warning",
    )


def _constants(graph: ir.Graph, trained: Collection[str]) -> Iterator[Finding]:
    found = {n: v.reason for n, v in verdicts(graph).items() if v.is_taken_for_constant and n not in trained}
    names = [n for n in found if n in graph.initializers and graph.initializers[n].uses()]
    if not names:
        return
    one = len(names) == 1
    yield Finding(
        f"the {'tensor' if one else 'tensors'} {listed(names, _NAMED)}",
        f"{'is' if one else 'are'} not trained",
        f"the graph reads {'it as a constant' if one else 'them as constants'} (input normalisation, box decoding, "
        "output scaling or masks)",
        f"if {'it was' if one else 'one was'} learned, name it in full: train=['*', '{shown(names[0])}'] "
        f"(--train '*' --train {shown(names[0])})",
        "warning",
    )


def _computed_before(graph: ir.Graph, trained: Collection[str]) -> list[Finding]:
    """Return findings about stored tensors that were computed from a trained weight, and become outdated in training.

    Running statistics, lookup tables and tensors that the file marks as parameters are excluded, because they are not
    computed from other tensors.
    """
    stored = [graph.initializers[n] for n in verdicts(graph) if n in graph.initializers]
    originals = running_statistics(graph) | {v for v in stored if is_named_state(graph, v) or _readers(v) == {"Gather"}}
    tensors = [v for v in stored if v not in originals and not v.is_graph_input()]
    tensors.sort(key=lambda v: not has_generated_name(v))  # of a pair, the one with a generated name is the copy
    peers = _peers(tensors, trained)
    found: dict[frozenset[ir.Value], Copy] = {}
    for copy in find_copies([graph.initializers[n] for n in trained], tensors, lambda v: peers.get(v, v)):
        are_alike = copy.relation == "is {}" and not _readers(copy.tensor).isdisjoint(_readers(copy.weight))
        if not (copy.tensor.name in trained and are_alike):
            found.setdefault(frozenset((copy.tensor, copy.weight)), copy)
    return [_finding(copy, copy.tensor.name in trained, without_folding(graph)) for copy in found.values()]


def _merged_weights(graph: ir.Graph, trained: Collection[str]) -> Iterator[Finding]:
    found = find_merged([graph.initializers[n] for n in trained])
    if not found:
        return
    one, most = len(found) == 1, max(len(modules_of(v)) for v in found)
    yield Finding(
        f"the {'weight' if one else 'weights'} {listed([v.name or '' for v in found], _NAMED)}",
        f"{'trains' if one else 'each train'} as one, though {most if one else f'up to {most}'} modules read "
        f"{'it' if one else 'them'}, since exporters store weights with equal initial values once",
        "",
        "give each module its own with gg.surgery.untie_weights (gradgraph surgery --untie-merged)",
        "warning",
    )


def _frozen_norms(graph: ir.Graph, trained: Collection[str]) -> Iterator[Finding]:
    weights = [graph.initializers[n] for n in trained]
    pairs = find_frozen_norms(v for v in weights if not is_named_state(graph, v))
    names = sorted(v.name or "" for pair in pairs for v in pair)
    if not names:
        return
    yield Finding(
        f"the tensors {listed(names, _NAMED)}",
        "are trained",
        "they scale and shift channels of convolutions, as a norm with fixed statistics does (FrozenBatchNorm), "
        "which PyTorch does not train",
        f"if they are such norms, {without_folding(graph)}, or name them to freeze",
        "warning",
    )


def _no_dropout(graph: ir.Graph, trained: Collection[str]) -> Iterator[Finding]:
    """Yield a finding if an attention model has no Dropout, which an export in evaluation mode may have removed."""
    nodes = list(graph.all_nodes())
    if exporter_of(graph) in ("", OURS) or any(node.op_type in _RANDOM for node in nodes):
        return
    tensors = [t for name in trained if (t := graph.initializers[name].const_value) is not None]
    if not any(len(t.shape) == 1 and t.size > 1 for t in tensors) or not any(map(_centres, nodes)):
        return
    attentions, _ = weights_of_attentions(list(graph))
    if attentions:
        count = len(attentions)
        yield Finding(
            "the model",
            f"has {counted(count, 'attention layer')}, but no Dropout",
            "an export in evaluation mode removes Dropout",
            "if the network had Dropout, export it in training mode, or with gradgraph.frontend.from_torch",
            "warning",
        )


def review_integers(graph: ir.Graph) -> Iterator[Finding]:
    """Yield a warning if an inference model has int8 weights that can saturate on some processors."""
    names = [v.name or "" for v in find_saturating(graph)]
    if names:
        yield Finding(
            f"the int8 {'weight' if len(names) == 1 else 'weights'} {listed(names, _NAMED)}",
            "can saturate in onnxruntime on x86 processors without VNNI",
            "outputs there differ from those in training",
            "quantise the float model again with gg.quantize, or onnxruntime's reduce_range=True, which use 7 bits",
            "warning",
        )


def _centres(node: ir.Node) -> bool:
    """Whether ``node`` is a LayerNormalization, or computes ``x − mean(x)``, the first step of a decomposed one.

    Language models without Dropout use RMS norms, which subtract no mean.
    """
    if is_standard(node, "Sub"):
        mean = made_by(node.inputs[1], "ReduceMean")
        return mean is not None and mean.inputs[0] is node.inputs[0]
    return is_standard(node, "LayerNormalization")


def _peers(tensors: Iterable[ir.Value], trained: Collection[str]) -> dict[ir.Value, frozenset[str]]:
    """Return the operators that read each trained weight: weights with equal readers are peers, in similar layers.

    Only large weights, and weights that no arithmetic operator reads, are included.
    """
    readers = {v: _readers(v) for v in tensors if v.name in trained and v.const_value is not None}
    return {v: kinds for v, kinds in readers.items() if _ARITHMETIC.isdisjoint(kinds) or _size(v) > _LEAST_NUMBERS}


def _size(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.size


def _readers(value: ir.Value) -> frozenset[str]:
    """Return the operators that read ``value``; a Gemm or Transpose counts as MatMul."""
    return frozenset("MatMul" if n.op_type in ("Gemm", "Transpose") else n.op_type for n in value.consumers())


def _finding(copy: Copy, is_trained: bool, remedy: str) -> Finding:
    weight = f"'{shown(copy.weight.name)}'"
    fate = "both are trained independently" if is_trained else f"it will not change when {weight} is trained"
    return Finding(f"tensor '{shown(copy.tensor.name)}'", copy.relation.format(weight), fate, remedy, "warning")


def as_data(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Convert findings to JSON data."""
    return [dataclasses.asdict(finding) for finding in findings]
