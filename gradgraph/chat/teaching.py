"""A larger model that teaches: its scores of the answers' tokens beside those of the model that learns."""

from __future__ import annotations

import onnx_ir as ir

from gradgraph import surgery
from gradgraph.chat.chat_recipe import Recipe
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.tokens import Encoder
from gradgraph.errors import BuildError, DataError, shown
from gradgraph.graph.builder import Builder
from gradgraph.graph.shapes import shape_of
from gradgraph.passes.normal.edit import names_of
from gradgraph.surgery.language_models import POSITIONS, SEGMENTS

TEMPERATURE, SHARE = 2.0, 0.5  # by default, those of gg.distill


def taught(student: ir.Model, base: ModelFolder, recipe: Recipe) -> ir.Model:
    """The model that learns, with the teacher of the recipe beside it.

    A teacher that has more scores, as larger models of a family are filled up to rounder numbers, is asked for those
    of the first tokens alone.

    Args:
        student: what ``surgery.language_model`` has made.
        base: its folder.

    Raises:
        DataError: the teacher has other tokens.
        ModelError, BuildError: it cannot be read, or is no such model.
    """
    assert recipe.teacher is not None
    other = ModelFolder.of(recipe.teacher)
    if Encoder(other.path).tokenizer.words != Encoder(base.path).tokenizer.words:
        raise DataError(
            f"the teacher '{shown(other.path)}' has another tokenizer than '{shown(base.path)}', and the scores of two "
            "models are compared token by token; take a teacher of the same family"
        )
    try:
        teacher = surgery.language_model(other.decoder(), packed=recipe.pack)
        assert isinstance(teacher, ir.Model)  # as load_model gives one
        _keep_first(teacher, _scores(student))
        found = surgery.distill(
            student,
            teacher,
            TEMPERATURE if recipe.temperature is None else recipe.temperature,
            alpha=SHARE if recipe.teacher_share is None else recipe.teacher_share,
            inputs={_tokens(teacher): _tokens(student)},
        )
    except BuildError as error:
        raise BuildError(
            f"the teacher '{shown(other.path)}' cannot teach: {error.problem}; take another teacher"
        ) from None
    assert isinstance(found, ir.Model)  # as the student is one
    return found


def _tokens(model: ir.Model) -> str:
    own = (v.name or "" for v in model.graph.inputs if not v.is_initializer())
    return next(name for name in own if name not in (SEGMENTS, POSITIONS))


def _scores(model: ir.Model) -> int | str | None:
    shape = shape_of(model.graph.outputs[0])
    return shape[-1] if shape else None


def _keep_first(teacher: ir.Model, count: int | str | None) -> None:
    """Let the teacher give ``count`` scores, where it has more; raises BuildError where it has fewer."""
    own = _scores(teacher)
    if not isinstance(count, int) or not isinstance(own, int) or own == count:
        return
    if own < count:
        raise BuildError(f"it scores {own:,} tokens, and the model that learns {count:,}; take another teacher")
    graph = teacher.graph
    op, old = Builder(taken=names_of(teacher)), graph.outputs[0]
    new = op.Slice(op.wrap(old), [0], [count], [2])
    new.value.type, new.value.shape = old.type, ir.Shape([*(old.shape or ())[:2], count])
    graph.outputs[0] = new.value
    op.finish(graph)
