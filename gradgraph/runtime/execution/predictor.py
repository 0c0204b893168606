"""Prediction with any inference model, not only with a step's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.backends.ort_cpu.packed_products import with_stored_weights
from gradgraph.data.arrays.batch import Array, BatchChecker
from gradgraph.data.record.data_names import DataNames
from gradgraph.data.record.specs import TensorSpec, dtype_name
from gradgraph.data.sources.in_order import Ordered
from gradgraph.errors import DataError, ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.float16_weights import STORED
from gradgraph.graph.shape_inference import shape_of
from gradgraph.graph.shapes import as_dims
from gradgraph.runtime.execution.frozen_weights import computes_with_weights, proto_and_weights
from gradgraph.runtime.execution.joining import filled, layouts, of_first
from gradgraph.runtime.execution.node_order import in_good_order
from gradgraph.runtime.execution.session import (
    CPU,
    Device,
    Placement,
    RuntimeOptions,
    check_weights,
    create_session,
    explained,
    results,
    weights_pass_through,
)


class Predictor:
    """A session for an inference model, with checked inputs and named outputs.

    Args:
        model: the model, with its weights inside or in external files.
        outputs: names of the outputs to compute, in this order; all by default.
        packs: whether onnxruntime may copy large weights into the order in which matrix products read them. If False,
            nodes that compute on weights (dequantization, transposes) are not folded either, but run with each batch.
        options: settings of onnxruntime; ignored if nodes are not folded because of ``packs=False``.

    Attributes:
        specs: the inputs by name.
        outputs: names of the computed outputs.
        layouts: the sample axes of the outputs.
        names: the names of the data that the model was trained on.
        probable: names of the outputs that are probabilities (see :func:`is_probable`).

    Raises:
        UnknownNameError: if the model does not have one of ``outputs``.
        ModelError: if an input is not a tensor, or onnxruntime refuses the model.
        RuntimeUnavailableError: if the device is not available.
    """

    def __init__(
        self,
        model: ir.Model,
        outputs: Sequence[str] = (),
        device: Device = "auto",
        packs: bool = True,
        options: RuntimeOptions | None = None,
    ) -> None:
        known = [o.name or "" for o in model.graph.outputs]
        for name in outputs:
            if name not in known:
                raise UnknownNameError(f"the model has no output '{shown(name)}'{suggestion(name, known)}")
        self.outputs = list(dict.fromkeys(outputs)) or known
        self.specs = {s.name: s for s in map(_spec, model.graph.inputs) if s.name not in model.graph.initializers}
        self.names = DataNames.read_from(model.metadata_props)
        self.probable = {o.name or "" for o in model.graph.outputs if is_probable(o)}
        self._checker = BatchChecker(self.specs.values())
        placement, in_few_bits = Placement.choose(device), _in_few_bits(model)
        if in_few_bits and placement.providers[0] == CPU:
            model = with_stored_weights(model, packs)
        proto, weights = proto_and_weights(model)
        self.layouts = layouts(proto, self.specs)
        if not packs and (in_few_bits or computes_with_weights(proto)):
            options, proto = RuntimeOptions(optimization="none"), in_good_order(proto, self.specs, ())
        self._session = create_session(proto, placement, options, weights, packs=packs)

    @property
    def fixed_rows(self) -> int | None:
        """The model's fixed batch size; None if it is not fixed."""
        return self._checker.fixed_rows

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs for a batch, by name.

        Raises:
            DataError: if the batch does not match the inputs of the model.
            ModelError: if onnxruntime fails, or a file with weights was overwritten since it was opened.
        """
        feeds = self._checker(batch)
        check_weights(self._session)
        with explained("running the model failed"), weights_pass_through(self._session):
            found = results(self._session, self.outputs, feeds)
        check_weights(self._session)
        return found

    def over(self, data: Ordered, batch_size: int) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the number of samples and the outputs of each batch.

        For a fixed batch size, the last batch is padded with copies of its last sample, whose outputs are dropped.
        """
        for i, batch in enumerate(data.batches(batch_size)):
            whole, rows = filled(batch, batch_size if self.fixed_rows else 0)
            try:
                found = self(whole)
            except DataError as error:
                raise error.at(f"batch {i}") from None
            if whole is not batch:
                found = {n: of_first(n, a, rows, batch_size, self.layouts[n]) for n, a in found.items()}
            yield rows, found


def is_probable(value: ir.Value) -> bool:
    """Return whether a model output contains class probabilities.

    It does after a Softmax over the second, last or an unknown axis, or a Sigmoid of one number per sample.
    """
    found = probabilities(value)
    if found is None:
        return False
    if found.kind == "Sigmoid":
        shape = shape_of(value)
        return shape is not None and len(shape) > 0 and shape[1:] in ((), (1,))
    return found.axis in (None, -1, 1)


def _in_few_bits(model: ir.Model) -> bool:
    """Return whether a model stores weights as float16, or as integers that it dequantizes.

    An optimizing session makes larger copies of such weights: it folds Casts, and fuses DequantizeLinear and a matrix
    product to MatMulNBits. Integer weights of models that also quantize activations do not count, since integer
    products read weights in their stored form.
    """
    operators = {node.op_type for node in model.graph}
    few = any(name.endswith(STORED) for name in model.graph.initializers)
    return few or ("DequantizeLinear" in operators and "QuantizeLinear" not in operators)


def _spec(value: ir.Value) -> TensorSpec:
    if value.dtype is None or value.shape is None:
        raise ModelError(
            f"the model declares no element type or no rank for the input '{shown(value.name)}', so data for it cannot "
            "be checked; export the model with the types and shapes of its inputs"
        )
    return TensorSpec(value.name or "", dtype_name(int(value.dtype)), as_dims(value.shape))
