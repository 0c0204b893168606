"""Export of a scikit-learn pipeline that ends in one of our estimators as a single ONNX file.

Other steps of the pipeline are converted by skl2onnx.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from gradgraph.arguments import described
from gradgraph.data.preprocess.frames import GAP_WORDS, is_gap
from gradgraph.data.record.data_names import DataNames
from gradgraph.errors import ArgumentError, ModelError, RuntimeUnavailableError, shown
from gradgraph.files.models import save_model
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.execution.session import Placement, create_session, explained
from gradgraph.sklearn.classifier import Classifier
from gradgraph.sklearn.estimator import Estimator

LARGEST_DIFFERENCE = 1e-4  # allowed difference from predict, relative to the largest output (at least 1)


def export(estimator: Any, path: str | os.PathLike[str] | None = None, X: Any = None) -> onnx.ModelProto:
    """Export a fitted estimator, or a pipeline that ends in one, as plain ONNX: columns in, labels out.

    Args:
        estimator: a ``Classifier`` or ``Regressor``, a ``Pipeline`` whose last step is one, a fitted search over
            these, or a ``TransformedTargetRegressor`` around one.
        path: output file; None to only return the model.
        X: some input rows for ``predict``. They determine the input columns and types, and the file is verified against
            ``predict`` on them before it is written. Without ``X``, columns that an encoder has seen as text are text,
            and all others are float64. Steps that do not support float64 compute in float32.

    Returns:
        A model with an input ``X`` [rows, features]; for a pipeline fitted on a table, one input [rows, 1] per column,
        named like the column. Its outputs are the results of ``predict`` and ``predict_proba``: ``label`` [rows] and
        ``probabilities`` [rows, classes] (for multilabel data, both [rows, labels]), or for a regressor ``variable``.
        If a column already has such a name, the output is ``label_1`` and so on.

    Raises:
        ArgumentError: if ``estimator`` does not end in an estimator of gradgraph, or for an unknown target transform.
        ModelError: if skl2onnx cannot convert a step, or the file differs from ``predict`` on ``X``.
        RuntimeUnavailableError: if the pipeline has other steps, and skl2onnx is not installed.
        OutputError: if ``path`` cannot be written, or has the extension of another format.
    """
    if path is not None:
        check_suffix(path, ".onnx")
    parts = _parts(estimator)
    kinds = _kinds(parts, X)
    model = _with_results(parts, _scores(parts.last), kinds)
    if parts.steps:
        model = _with_steps(parts, model, estimator, X, kinds)
    elif X is not None:
        _check_equal(_taking(kinds, model), estimator, X, kinds)
    if path is not None:
        save_model(model, path)
    return model


_Kinds: TypeAlias = Mapping[str, "np.dtype[Any]"]


class _Parts(NamedTuple):
    """The parts of a pipeline.

    Attributes:
        steps: the pipeline steps before our estimator.
        last: our estimator.
        targets: the fitted transformers of the targets, outermost first.
    """

    steps: list[Any]
    last: Estimator
    targets: list[Any]


def _parts(estimator: Any) -> _Parts:
    steps, targets = list[Any](), list[Any]()
    while not isinstance(estimator, Estimator):
        check_is_fitted(estimator)
        if hasattr(estimator, "best_estimator_"):
            estimator = estimator.best_estimator_
        elif isinstance(estimator, Pipeline):
            *before, estimator = [step for _, step in estimator.steps]
            steps += [step for step in before if step is not None and not isinstance(step, str)]
        elif isinstance(estimator, TransformedTargetRegressor):
            targets.append(estimator.transformer_)
            estimator = estimator.regressor_
        else:
            raise ArgumentError("export requires an estimator of gradgraph.sklearn, or a pipeline that ends in one, "
                                f"but this ends in {described(estimator)}; use skl2onnx for others")  # fmt: skip
    check_is_fitted(estimator)
    return _Parts(steps, estimator, targets)


# --- after the model -------------------------------------------------------------------------------------


def _scores(estimator: Estimator) -> onnx.ModelProto:
    """Return the estimator's trained model with only its first output: class scores or values."""
    trainer = estimator.trained_.trainer
    return trainer.export(outputs=[trainer.manifest.outputs[0]])


class _Nodes:
    """A writer that appends nodes, constants and graph outputs to a model, under unused names.

    Names of graph outputs also differ from ``columns``, the names of inputs added later.
    """

    def __init__(self, model: onnx.ModelProto, columns: Collection[str]) -> None:
        self._graph, self._columns = model.graph, columns
        self._taken = {name for node in model.graph.node for name in (*node.input, *node.output)}

    def __call__(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        out = name or self._fresh(op_type)
        self._graph.node.append(helper.make_node(op_type, inputs, [out], **attributes))
        return out

    def output(self, name: str, op_type: str, *inputs: str, shape: Sequence[Any], kind: int, **attributes: Any) -> None:
        """Append a node whose result is a graph output of this shape and element type.

        If ``name`` is taken, the output is called ``<name>_1`` and so on.
        """
        taken = {*self._columns, *(o.name for o in self._graph.output)}
        others = (f"{name}_{i}" for i in range(1, len(taken) + 2))
        free = next(n for n in itertools.chain([name], others) if n not in taken)
        self(op_type, *inputs, name=free, **attributes)
        self._graph.output.append(helper.make_tensor_value_info(free, kind, shape))

    def constant(self, array: Any) -> str:
        name = self._fresh("constant")
        array = np.asarray(array)
        texts = array.dtype.kind == "U"
        self._graph.initializer.append(numpy_helper.from_array(array.astype(object) if texts else array, name))
        return name

    def _fresh(self, base: str) -> str:
        name = next(n for n in (f"result/{base}_{i}" for i in range(len(self._taken) + 1)) if n not in self._taken)
        self._taken.add(name)
        return name


def _with_results(parts: _Parts, model: onnx.ModelProto, columns: Collection[str]) -> onnx.ModelProto:
    """Make ``model``, in place, return the results of ``predict`` and ``predict_proba``; return ``model``.

    The input is renamed to ``X``. ``columns`` are the names of inputs added later.
    """
    op, out, last = _Nodes(model, columns), model.graph.output[0].name, parts.last
    del model.graph.output[:], model.metadata_props[:]
    if isinstance(last, Classifier):
        _labels(op, last, out)
        classes = last.trained_.trainer.names.classes
        helper.set_model_props(model, DataNames(classes=classes, softmax=tuple(classes)).as_metadata())
    else:
        for transformer in reversed(parts.targets):
            out = _inverse(op, transformer, out)
        shape = [-1] if getattr(last, "_is_flat", False) else [0, -1]
        value = op("Cast", out, to=TensorProto.FLOAT)
        op.output("variable", "Reshape", value, op.constant(np.array(shape)), shape=[None] * len(shape),
                  kind=TensorProto.FLOAT)  # fmt: skip
    renamed(model.graph, {model.graph.input[0].name: "X"})
    return model


def renamed(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename inputs of a graph in place by ``names``, old name → new name.

    Other tensors with one of the new names get the suffix ``/inner``.
    """
    taken = {name for node in graph.node for name in node.output} | {t.name for t in graph.initializer}
    every = {name: f"{name}/inner" for name in names.values() if name in taken} | dict(names)
    for value in graph.input:
        value.name = every.get(value.name, value.name)
    for tensor in graph.initializer:
        tensor.name = every.get(tensor.name, tensor.name)
    for node in graph.node:
        node.input[:] = [every.get(name, name) for name in node.input]
        node.output[:] = [every.get(name, name) for name in node.output]


def _labels(op: _Nodes, last: Classifier, scores: str) -> None:
    """Append nodes that compute the outputs ``label`` and ``probabilities`` from the tensor ``scores``.

    For multilabel data, both have one entry per label.
    """
    scores, width = op("Cast", scores, to=TensorProto.FLOAT), len(last.classes_)
    if last._is_multilabel or last._has_one_score:
        flat = op("Reshape", scores, op.constant(np.array([-1, width if last._is_multilabel else 1])))
        p = flat if last._probable == "Sigmoid" else op("Sigmoid", flat)
        if last._has_one_score:
            p = op("Concat", op("Sub", op.constant(np.float32(1)), p), p, axis=1)
    elif last._probable == "Softmax":
        p = op("Div", scores, op("ReduceSum", scores, op.constant(np.array([1])), keepdims=1))
    else:
        p = op("Softmax", scores, axis=1)
    if last._is_multilabel:
        above = op("Greater", p, op.constant(np.float32(0.5)))
        op.output("label", "Cast", above, to=TensorProto.INT64, shape=[None, width], kind=TensorProto.INT64)
    else:
        best = op("ArgMax", p if last._has_one_score else scores, axis=1, keepdims=0)
        of = last.classes_.dtype
        kind = TensorProto.STRING if of.kind in "OU" else helper.np_dtype_to_tensor_dtype(of)
        op.output("label", "Gather", op.constant(last.classes_), best, shape=[None], kind=kind)
    op.output("probabilities", "Identity", p, shape=[None, width], kind=TensorProto.FLOAT)


def _inverse(op: _Nodes, transformer: Any, value: str) -> str:
    """Append nodes that apply the inverse of a target transformer to the tensor ``value``; return the result's name.

    Raises:
        ArgumentError: if the transformer is not supported.
    """
    kind, f = type(transformer).__name__, getattr(transformer, "inverse_func", None)

    def of(array: Any) -> str:
        return op.constant(np.asarray(array, np.float32))

    if kind == "StandardScaler":
        scaled = value if transformer.scale_ is None else op("Mul", value, of(transformer.scale_))
        return scaled if transformer.mean_ is None else op("Add", scaled, of(transformer.mean_))
    if kind == "MinMaxScaler":
        return op("Div", op("Sub", value, of(transformer.min_)), of(transformer.scale_))
    if f in (np.exp, np.expm1):
        return op("Sub", op("Exp", value), of(float(f is np.expm1)))
    raise ArgumentError(f"targets transformed by {shown(f'{transformer!r:.99}')} cannot be exported; use "
                        "StandardScaler, MinMaxScaler, or inverse_func=numpy.exp or numpy.expm1")  # fmt: skip


# --- before the model ------------------------------------------------------------------------------------


def _with_steps(parts: _Parts, model: onnx.ModelProto, estimator: Any, X: Any, kinds: _Kinds) -> onnx.ModelProto:
    """Return a model of the pipeline: the steps before our estimator, followed by ``model``, the estimator itself.

    The result is verified against the predictions of ``estimator``, the whole pipeline, on ``X``. If this fails, the
    steps before compute in float32 instead.
    """
    words: dict[str, str] = {}
    for name in kinds:
        if (other := words.setdefault(re.sub(r"\W", "_", name, flags=re.ASCII), name)) != name:
            raise ArgumentError(f"the columns '{shown(other)}' and '{shown(name)}' differ only in special characters, "
                                "so skl2onnx cannot distinguish them; rename one of them")  # fmt: skip
    try:
        found = _behind(_before(parts, kinds), model)
        _check_equal(found, estimator, X, kinds)
    except ModelError:  # some steps support only float32
        narrow = {name: np.dtype(np.float32) if kind.kind in "fiu" else kind for name, kind in kinds.items()}
        found = _behind(_taking(kinds, _before(parts, narrow)), model)
        _check_equal(found, estimator, X, kinds)
    return found


def _taking(kinds: _Kinds, before: onnx.ModelProto) -> onnx.ModelProto:
    """Change the input types of ``before`` to ``kinds`` in place, by Casts to the original types; return ``before``."""
    for value in before.graph.input:
        had, taken = value.type.tensor_type.elem_type, _element(kinds[value.name])
        if had != taken:
            inner = f"{value.name}/cast"
            for node in before.graph.node:
                node.input[:] = [inner if name == value.name else name for name in node.input]
            before.graph.node.insert(0, helper.make_node("Cast", [value.name], [inner], to=had))
            value.type.tensor_type.elem_type = taken
    return before


def _element(kind: np.dtype[Any]) -> int:
    wide: dict[str, int] = {
        "i": TensorProto.INT64,
        "u": TensorProto.INT64,
        "b": TensorProto.BOOL,
        "f": TensorProto.FLOAT,
    }
    return int(TensorProto.DOUBLE if kind == np.float64 else wide.get(kind.kind, TensorProto.STRING))


def _kinds(parts: _Parts, X: Any) -> _Kinds:
    """Return the dtype of each input of the exported model, by name: the columns of a table, or one matrix ``X``."""
    if not parts.steps:
        return {"X": np.dtype(np.float32) if X is None else np.asarray(X).dtype}
    if hasattr(X, "columns"):
        return {str(name): np.asarray(X[name][:1]).dtype for name in X.columns}
    if X is not None:
        return {"X": X.dtype}
    first = parts.steps[0]
    columns = list(getattr(first, "feature_names_in_", ()))
    texts = _texts(first, columns)
    return {str(name): np.dtype(object if name in texts else np.float64) for name in columns or ["X"]}


def _before(parts: _Parts, kinds: _Kinds) -> onnx.ModelProto:
    """Return the pipeline steps before our estimator as a model with the inputs ``kinds``, converted by skl2onnx.

    Raises:
        ModelError: if skl2onnx cannot convert a step.
        RuntimeUnavailableError: if skl2onnx is not installed.
    """
    try:
        from skl2onnx import to_onnx
    except ImportError:
        raise RuntimeUnavailableError(
            "exporting the steps of a pipeline requires skl2onnx; pip install skl2onnx"
        ) from None
    steps = Pipeline([(f"step{i}", step) for i, step in enumerate(parts.steps)])
    opset = next(o.version for o in parts.last.trained_.step.eval.opset_import if not o.domain)
    try:
        written = to_onnx(steps, initial_types=_types(kinds, parts.steps[0].n_features_in_),
                          target_opset={"": opset, "ai.onnx.ml": 3})  # fmt: skip
    except Exception as error:  # skl2onnx raises exceptions of many classes
        raise ModelError(f"skl2onnx cannot convert the steps before the estimator ({shown(_first_line(error))}); "
                         "export the estimator only, or choose other steps") from None  # fmt: skip
    model = cast("onnx.ModelProto", written)  # its annotation allows five other types
    if [i.name for i in model.graph.input] != list(kinds):  # skl2onnx replaces special characters with _
        renamed(model.graph, dict(zip([i.name for i in model.graph.input], kinds, strict=True)))
    read = {name for node in model.graph.node for name in node.input}
    for unread in [i for i in model.graph.input if i.name not in read]:
        model.graph.input.remove(unread)
    columns = getattr(parts.steps[0], "feature_names_in_", ())
    return _taking_gaps(model, _texts(parts.steps[0], list(columns)))


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _types(kinds: _Kinds, features: int) -> list[tuple[str, Any]]:
    """Return the name of each input with skl2onnx's type object; a single input is a matrix of ``features`` columns."""
    from skl2onnx.common import data_types as of

    types: dict[int, Any] = {TensorProto.FLOAT: of.FloatTensorType, TensorProto.DOUBLE: of.DoubleTensorType,
             TensorProto.INT64: of.Int64TensorType, TensorProto.BOOL: of.BooleanTensorType,
             TensorProto.STRING: of.StringTensorType}  # fmt: skip
    width = features if len(kinds) == 1 else 1
    return [(name, types[_element(kind)]([None, width])) for name, kind in kinds.items()]


def _texts(step: Any, columns: Sequence[Any]) -> dict[Any, list[Any]]:
    """Return, for each text column of a fitted step, the values that the step knows."""
    if hasattr(step, "transformers_"):
        found = dict[Any, list[Any]]()
        for name, inner, _ in step.transformers_:
            if not isinstance(inner, str):  # "drop" or "passthrough"
                found |= _texts(inner, [columns[i] for i in step._transformer_to_input_indices[name]])
        return found
    if isinstance(step, Pipeline):
        return _texts(step.steps[0][1], columns)
    seen = getattr(step, "categories_", getattr(step, "statistics_", ()))
    known = {name: list(np.atleast_1d(values)) for name, values in zip(columns, seen, strict=False)}
    return {name: values for name, values in known.items() if any(isinstance(value, str) for value in values)}


def _taking_gaps(before: onnx.ModelProto, texts: Mapping[Any, Sequence[Any]]) -> onnx.ModelProto:
    """Insert nodes into ``before``, in place, that recognize missing values in text columns; return ``before``.

    They replace ``GAP_WORDS``, such as "", by the text for missing values among the values that the step knows
    (``texts`` by column).
    """
    taken = {value.name for value in before.graph.input}
    for name, values in ((str(name), values) for name, values in texts.items()):
        gap = next((str(value) for value in values if is_gap(value)), None)  # the text that skl2onnx writes for it
        if gap is None or name not in taken:
            continue
        words = "|".join(re.escape(word) for word in GAP_WORDS if word not in values)
        made, is_one, word = (f"{name}/{part}" for part in ("filled", "missing", "word"))
        for node in before.graph.node:
            node.input[:] = [made if one == name else one for one in node.input]
        nodes = [
            helper.make_node("RegexFullMatch", [name], [is_one], pattern=f"({words})"),
            helper.make_node("Constant", [], [word], value_string=gap),
            helper.make_node("Where", [is_one, word, name], [made]),
        ]
        for node in reversed(nodes):
            before.graph.node.insert(0, node)
    return before


def _behind(before: onnx.ModelProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of ``before`` followed by ``model``, whose input is the first output of ``before``."""
    first = onnx.compose.add_prefix(before, "before/", rename_inputs=False)
    second = onnx.compose.add_prefix(model, "model/", rename_outputs=False)
    out, features = first.graph.output[0], "before/features"
    while any(features == column.name for column in first.graph.input):
        features += "_"
    cast = helper.make_node("Cast", [out.name], [features], to=TensorProto.FLOAT)
    out.name, out.type.tensor_type.elem_type = features, TensorProto.FLOAT
    first.graph.node.append(cast)
    # skl2onnx writes nodes of the requested opset, but declares the lowest opset that has them
    opsets = {o.domain: o.version for o in (*first.opset_import, *second.opset_import)}
    for part in (first, second):
        part.ir_version = model.ir_version
        del part.opset_import[:]
        part.opset_import.extend(helper.make_opsetid(*pair) for pair in opsets.items())
    merged = onnx.compose.merge_models(first, second, [(features, second.graph.input[0].name)])
    merged.producer_name = "gradgraph"
    return merged


def _check_equal(model: onnx.ModelProto, estimator: Any, X: Any, kinds: _Kinds) -> None:
    """Raise ModelError if onnxruntime cannot run the model, or its predictions on ``X`` differ from the estimator's."""
    with explained("the file does not run in onnxruntime"):
        session = create_session(model, Placement.choose("cpu"))
        if X is None:
            return
        read = {i.name: kinds[i.name] for i in session.get_inputs()}
        given = np.asarray(session.run(None, _feeds(X, read))[-1])
    wanted = estimator.predict_proba(X) if hasattr(estimator, "predict_proba") else estimator.predict(X)
    scale = max(1.0, float(np.abs(wanted).max(initial=0)))
    if not np.allclose(given, wanted, rtol=0, atol=LARGEST_DIFFERENCE * scale):
        worst = float(np.abs(given - wanted).max())
        raise ModelError(f"outputs of the exported model differ from the pipeline by {worst:.2g}, since skl2onnx "
                         "converts a step differently; remove that step, or choose another one")  # fmt: skip


def _feeds(X: Any, kinds: _Kinds) -> dict[str, Any]:
    """Return ``X``, a table or a matrix, as inputs of the exported model by name, with the dtypes ``kinds``."""
    columns = {"X": X, **{str(name): X[name] for name in getattr(X, "columns", ())}}
    types = {name: helper.tensor_dtype_to_np_dtype(_element(kind)) for name, kind in kinds.items()}
    arrays = {name: _filled(np.asarray(columns[name])).astype(kind) for name, kind in types.items()}
    return {name: array[:, None] if array.ndim == 1 else array for name, array in arrays.items()}


def _filled(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a text column with missing values replaced by ""; return other arrays unchanged."""
    if values.dtype.kind != "O" or values.ndim > 1:
        return values
    return np.fromiter(("" if is_gap(value) else value for value in values.tolist()), object, len(values))
