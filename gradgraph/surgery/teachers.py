"""Distillation: a frozen teacher next to a student, in one model, whose outputs the student imitates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NUMBER, PATH, TEXT, Kind, checked, instance
from gradgraph.errors import BuildError, ModelError, UnknownNameError, listed, shown, suggestion
from gradgraph.files.model_metadata import Imitation, write_imitation
from gradgraph.files.models import Source
from gradgraph.graph.marks import TEACHER, TEACHERS
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import OPSET, clash
from gradgraph.passes.normal import load_runnable
from gradgraph.passes.normal.edit import names_of
from gradgraph.passes.normal.functions.inline import inline_functions
from gradgraph.passes.normal.opsets.opset import convert_to_opset
from gradgraph.surgery.joined_models import prefix_names, take_in
from gradgraph.surgery.operation import Path, Result, add_weight, closed, learn_sizes, numbers_of, opened, value_named

_POSITIVE = Kind("a number above zero", lambda v: NUMBER.fits(v) and v > 0)
_PART = Kind("a number from 0 to 1", lambda v: NUMBER.fits(v) and 0 <= v <= 1)
_NOT_NEGATIVE = Kind("a number of at least 0", lambda v: NUMBER.fits(v) and v >= 0)
_NAMES = instance(Mapping, "a dict of names, such as {'student value': 'teacher value'}")


@checked(temperature=_POSITIVE, alpha=_PART, match=_NAMES, match_weight=_NOT_NEGATIVE, inputs=_NAMES,
         output=TEXT.or_none(), teacher_output=TEXT.or_none(), out=PATH.or_none())  # fmt: skip
def distill(
    student: Source,
    teacher: Source,
    temperature: float = 2.0,
    *,
    alpha: float = 0.5,
    match: Mapping[str, str] = {},
    match_weight: float = 1.0,
    inputs: Mapping[str, str] = {},
    output: str | None = None,
    teacher_output: str | None = None,
    out: Path | None = None,
) -> Result:
    """Combine a student with a frozen teacher; a step minimises ``(1 − α)·loss + α·T²·KL(teacher ‖ student)``.

    ``loss`` is the loss passed to ``gg.build``; the second term compares the softmaxes of ``logits / T``, averaged over
    the positions (Hinton et al. 2015, arXiv:1503.02531). Positions with the loss's ``ignore_index`` as label, or
    excluded by ``mask`` or ``sample_weight`` of ``gg.build``, are ignored. The teacher runs in evaluation mode: no
    Dropout, BatchNormalization with its running statistics. It is not part of the state, nor of exported models.

    Args:
        student, teacher: paths, ``onnx.ModelProto`` or ``onnx_ir.Model``; they are not changed.
        temperature: T, the divisor of the logits.
        alpha: the share of the second term. With 1 and ``gg.build(model, loss=None)`` it is the only loss, and no
            targets are fed.
        match: pairs of a value of the student and a value of the teacher, such as hidden states, of equal shape. Their
            mean squared difference is added to the loss. In values whose leading axes are those of the labels, ignored
            positions are ignored here, too (a mask of other axes is an error).
        match_weight: factor of the sum of these differences.
        inputs: the student's input to use for an input of the teacher; by default the one of the same name. Other
            inputs of the teacher become inputs of the step.
        output, teacher_output: the logits; the first output by default. Inner values are allowed.
        out: write the result to this path.

    Returns:
        A model of the same type as ``student``, with the student's outputs and the compared values; names of the
        teacher begin with ``teacher.``.

    Raises:
        BuildError: the student already has a teacher, or shapes or types do not fit.
        ModelError: a BatchNormalization of the teacher has no stored statistics.
        UnknownNameError: the student or the teacher has no value of one of the names.
        OutputError: ``out`` cannot be written.
    """
    work, beside = opened(student, out), _teacher(teacher)
    if TEACHER in work.metadata_props:
        raise BuildError("the student already has a teacher; use the model without it")
    if any(name.startswith(TEACHERS) for name in names_of(work)):
        raise BuildError(
            f"names of the student begin with '{TEACHERS}', the prefix of the teacher's names; rename them"
        )
    if work.opset_imports.get("", OPSET) != beside.opset_imports.get("", OPSET):
        convert_to_opset(work)
        convert_to_opset(beside)
    pairs = [(value_named(work, output or work.graph.outputs[0].name or ""),
              value_named(beside, teacher_output or beside.graph.outputs[0].name or ""))]  # fmt: skip
    pairs += [(value_named(work, mine), value_named(beside, its)) for mine, its in match.items()]
    for mine, its in pairs:
        _check_alike(mine, its)
    names = [value.name or "" for value, _ in pairs]
    compared = [value for _, value in pairs]
    prefix_names(beside, TEACHERS)
    _share_inputs(work, beside, inputs)
    take_in(work, beside)
    own = tuple(v.name or "" for v in work.graph.outputs)
    new = dict.fromkeys(v for pair in pairs for v in pair)
    work.graph.outputs.extend(v for v in new if not v.is_graph_output())
    pairs_of_names = tuple((mine, its.name or "") for mine, its in zip(names, compared, strict=True))
    write_imitation(work, Imitation(float(temperature), float(alpha), float(match_weight), pairs_of_names, own))
    return closed(work, student, out)


def _teacher(source: Source) -> ir.Model:
    """Return a copy of the teacher without functions or optional inputs, in evaluation mode."""
    model = load_runnable(source)
    model.graph.inputs[:] = [v for v in model.graph.inputs if not v.is_initializer()]
    inline_functions(model)
    learn_sizes(model)
    for node in list(model.graph):
        if node.op_type == "Dropout" and not node.domain:
            kept = ir.Node("", "Identity", [node.inputs[0]], name=node.name)
            model.graph.insert_before(node, kept)
            _hand_over(node.outputs[0], kept.outputs[0])
            if not node.outputs[-1].uses():
                model.graph.remove(node, safe=True)
        elif node.op_type == "BatchNormalization" and not node.domain:
            _fix_statistics(model, node)
    return model


def _hand_over(old: ir.Value, new: ir.Value) -> None:
    new.type, new.shape = old.type, old.shape
    name, old.name = old.name, None
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _fix_statistics(model: ir.Model, node: ir.Node) -> None:
    """Replace BatchNormalization (with running statistics) by a product and a sum, which are not trained."""
    scale, bias, mean, variance = (numbers_of(v) for v in node.inputs[1:5])
    rank = len(shape_of(node.inputs[0]) or ()) if node.inputs[0] is not None else 0
    if scale is None or bias is None or mean is None or variance is None or rank < 2:
        raise ModelError(f"the teacher's '{shown(node.name)}' (BatchNormalization) has no stored statistics; export "
                         "the teacher in evaluation mode")  # fmt: skip
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    factor = scale.numpy().astype(np.float64) / np.sqrt(variance.numpy().astype(np.float64) + epsilon)
    shift = bias.numpy() - mean.numpy() * factor
    name, dtype = node.outputs[0].name or "norm", scale.dtype.numpy()
    stored = [
        add_weight(model, f"{name}.{role}", numbers.astype(dtype).reshape(-1, *[1] * (rank - 2)))
        for role, numbers in (("factor", factor), ("shift", shift))
    ]
    scaled = ir.Node("", "Mul", [node.inputs[0], stored[0]])
    scaled.outputs[0].name = f"{name}.scaled"
    moved = ir.Node("", "Add", [scaled.outputs[0], stored[1]], name=node.name)
    model.graph.insert_before(node, [scaled, moved])
    _hand_over(node.outputs[0], moved.outputs[0])
    model.graph.remove(node, safe=True)


def _check_alike(mine: ir.Value, its: ir.Value) -> None:
    a, b = shape_of(mine), shape_of(its)
    other = a is not None and b is not None and (len(a) != len(b) or clash(a, b))
    if other or (mine.dtype is not None and its.dtype is not None and mine.dtype != its.dtype):
        raise BuildError(
            f"'{shown(mine.name)}' of the student is {mine.dtype} {_shape_text(a)} and '{shown(its.name)}' of the "
            f"teacher {its.dtype} {_shape_text(b)}, so they cannot be compared; name values of equal shape and type"
        )


def _shape_text(shape: Any) -> str:
    return "of unknown shape" if shape is None else str([d if isinstance(d, int) else str(d) for d in shape])


def _share_inputs(work: ir.Model, teacher: ir.Model, given: Mapping[str, str]) -> None:
    mine = {v.name or "": v for v in work.graph.inputs}
    its = {v.name or "": v for v in teacher.graph.inputs if not v.is_initializer()}
    for name, other in given.items():
        for known, wanted in ((its, name), (mine, other)):
            if wanted not in known:
                whose = "teacher" if known is its else "student"
                raise UnknownNameError(f"the {whose} has no input '{shown(wanted)}'{suggestion(wanted, known)}")
    for name, value in its.items():
        shared = mine.get(given.get(name, name))
        if shared is not None:
            _check_alike(shared, value)
            value.replace_all_uses_with(shared, replace_graph_outputs=True)
    unknown = [v for n, v in its.items() if given.get(n, n) not in mine]
    if len(unknown) == len(its):
        raise BuildError(
            f"the student ({listed(list(mine))}) and the teacher ({listed(list(its))}) share no input",
            remedy="pair them: inputs={'teacher input': 'student input'}",
            shell="pair them: --teacher-input TEACHER=STUDENT",
        )
    for value in unknown:
        teacher.graph.inputs.remove(value)
        work.graph.inputs.append(value)
