"""Any inference model, run on batches of its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from gradgraph.autodiff.probabilities import probabilities
from gradgraph.errors import DataError, ModelError, UnknownNameError, shown, suggestion
from gradgraph.files.float16_weights import STORED
from gradgraph.graph.shapes import as_dims, shape_of
from gradgraph.runtime.data.batch import Array, BatchChecker
from gradgraph.runtime.data.in_order import Ordered
from gradgraph.runtime.execution.frozen_weights import computes_with_weights, proto_and_weights
from gradgraph.runtime.execution.joining import filled, layouts, of_first
from gradgraph.runtime.execution.node_order import in_good_order
from gradgraph.runtime.execution.session import (
    Device,
    Placement,
    RuntimeOptions,
    create_session,
    explained,
    results,
    weights_pass_through,
)
from gradgraph.step.data_names import DataNames
from gradgraph.step.manifest import TensorSpec, dtype_name


class Predictor:
    """A session for ``model``, and what it takes and gives.

    Args:
        model: with all its weights inside, or beside it.
        outputs: those to compute, in this order; all by default.
        device: where to run.
        packs: whether onnxruntime may copy large weights into the order in which products read them. Else it also
            computes what it needs of them (floats of integers, transposes) in each run, node by node, as the file says.
        options: settings of onnxruntime, where it packs weights or computes nothing of them.

    Attributes:
        specs: the inputs.
        outputs: the names of those computed.
        layouts: where they have their samples.
        names: of the data that the model was trained on.
        probable: the outputs that are a Softmax, or the Sigmoid of one number a sample.

    Raises:
        UnknownNameError: the model has no such output.
        ModelError: an input is no tensor, or onnxruntime refuses the model.
        RuntimeUnavailableError: the device is not available.
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
        proto, weights = proto_and_weights(model)
        self.layouts = layouts(proto, self.specs)
        if not packs and (_in_few_bits(model) or computes_with_weights(proto)):
            options, proto = RuntimeOptions(optimization="none"), in_good_order(proto, self.specs, ())
        self._session = create_session(proto, Placement.choose(device), options, weights, packs=packs)

    @property
    def fixed_rows(self) -> int | None:
        """The number of samples that the model is fixed to, if it is."""
        return self._checker.fixed_rows

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for a batch, by name; raises DataError if it does not fit, ModelError if onnxruntime fails."""
        feeds = self._checker(batch)
        with explained("running the model failed"), weights_pass_through(self._session):
            return results(self._session, self.outputs, feeds)

    def over(self, data: Ordered, batch_size: int) -> Iterator[tuple[int, dict[str, Array]]]:
        """The outputs batch by batch, each with the number of its samples. Where the model is fixed to a number of
        samples, the last batch is filled up with copies of its last one, whose outputs are left out.
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
    """Is ``value`` a Softmax, over the second axis where one can see it, or the Sigmoid of one number a sample?"""
    found = probabilities(value)
    if found is None:
        return False
    if found.kind == "Sigmoid":
        shape = shape_of(value)
        return shape is not None and len(shape) > 0 and shape[1:] in ((), (1,))
    return found.axis in (None, -1, 1)


def _in_few_bits(model: ir.Model) -> bool:
    """Are weights stored as float16, or as integers of which products read floats?

    An optimised session has copies of these: it computes Casts in advance, and makes MatMulNBits of a DequantizeLinear
    and a product. Where data are integers, too, there are products of integers, which read them as they are stored.
    """
    operators = {node.op_type for node in model.graph}
    few = any(name.endswith(STORED) for name in model.graph.initializers)
    return few or ("DequantizeLinear" in operators and "QuantizeLinear" not in operators)


def _spec(value: ir.Value) -> TensorSpec:
    if value.dtype is None or value.shape is None:
        raise ModelError(f"the input '{shown(value.name)}' has no element type or no rank, so no data can be checked")
    return TensorSpec(value.name or "", dtype_name(int(value.dtype)), as_dims(value.shape))
