"""Distillation from a larger teacher model: training on its next-token scores in answers, in addition to the labels."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from gradgraph import surgery
from gradgraph.chat.chat_recipe import Recipe
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.tokens import Encoder
from gradgraph.errors import BuildError, DataError, shown
from gradgraph.graph.builder import Builder
from gradgraph.graph.shape_inference import shape_of
from gradgraph.passes.normal.edit import names_of
from gradgraph.surgery.language_models import POSITIONS, SEGMENTS
from gradgraph.surgery.operation import as_model


def taught(student: ir.Model, base: ModelFolder, recipe: Recipe) -> ir.Model:
    """Return the student with the teacher of the recipe attached.

    If the teacher has more scores than the student, since vocabularies of larger models are padded to rounder numbers,
    only the student's number of scores is used.

    Args:
        student: a result of ``surgery.language_model``.
        base: the student's folder.
        recipe: a recipe with a teacher.

    Raises:
        DataError: the teacher has a different tokenizer.
        ModelError, BuildError: the teacher cannot be read, or is not a language model.
    """
    assert recipe.teacher is not None
    other = ModelFolder.of(recipe.teacher)
    if Encoder(other.path).tokenizer.words != Encoder(base.path).tokenizer.words:
        raise DataError(
            f"the teacher '{shown(other.path)}' has a different tokenizer from '{shown(base.path)}', but distillation "
            "compares the scores of each token; use a teacher of the same family"
        )
    try:
        teacher = as_model(surgery.language_model(other.decoder(), packed=recipe.pack))
        _keep_first(teacher, _scores(student))
        given = {"temperature": recipe.temperature, "alpha": recipe.teacher_share}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return as_model(surgery.distill(student, teacher, inputs={_tokens(teacher): _tokens(student)}, **chosen))
    except BuildError as error:
        raise BuildError(
            f"the teacher '{shown(other.path)}' cannot be used: {error.problem}; choose another teacher"
        ) from None


def _tokens(model: ir.Model) -> str:
    own = (v.name or "" for v in model.graph.inputs if not v.is_initializer())
    return next(name for name in own if name not in (SEGMENTS, POSITIONS))


def _scores(model: ir.Model) -> int | str | None:
    shape = shape_of(model.graph.outputs[0])
    return shape[-1] if shape else None


def _keep_first(teacher: ir.Model, count: int | str | None) -> None:
    """Reduce the teacher's output to ``count`` scores; raise BuildError if it has fewer."""
    own = _scores(teacher)
    if not isinstance(count, int) or not isinstance(own, int) or own == count:
        return
    if own < count:
        raise BuildError(f"it scores {own:,} tokens, but the student scores {count:,}; choose another teacher")
    graph = teacher.graph
    op, old = Builder(taken=names_of(teacher)), graph.outputs[0]
    new = op.Slice(op.wrap(old), [0], [count], [2])
    new.value.type, new.value.shape = old.type, ir.Shape([*(old.shape or ())[:2], count])
    graph.outputs[0] = new.value
    op.finish(graph)
