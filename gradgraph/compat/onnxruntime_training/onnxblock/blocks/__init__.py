"""Building blocks: each appends nodes to the current model, and returns the names of their outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import onnx

from gradgraph.compat.onnxruntime_training.onnxblock import _graph_utils, model_accessor
from gradgraph.errors import CompatibilityError

B = TypeVar("B", bound="Block")


class Block(ABC):
    """A part of a model. Subclasses implement ``build``, which appends nodes and returns the names of its outputs.

    Args:
        temp_file_name: has no effect; no temporary files are written.

    Attributes:
        base: the current model, an ``onnx.ModelProto``.
    """

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        self.base: onnx.ModelProto | Any = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Append nodes to ``self.base``; return the name of the output, or a tuple of names."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the block within ``with onnxblock.base(model):``; raise ``ValidationError`` if the model is invalid."""
        self.base = model_accessor.current_model()
        output = self.build(*args, **kwargs)
        onnx.checker.check_model(_graph_utils.without_large(self.base), full_check=True)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """Return a copy of the current model with inferred types and shapes."""
        return _graph_utils.inferred(model_accessor.current_model())

    # for the blocks in this package

    def _node(self, op_type: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Append a node; return the name of its output, which contains ``output``."""
        domain = attributes.pop("domain", None)
        result = _graph_utils.generate_graph_name(output or f"{op_type.lower()}_output")
        name = _graph_utils.generate_graph_name(op_type)
        self.base.graph.node.append(
            onnx.helper.make_node(op_type, list(inputs), [result], name, domain=domain, **attributes)
        )
        return result

    def _number(self, value: float, name: str) -> str:
        """Add an initializer of one float, and return its name."""
        return self._initializer(np.array([value], np.float32), name)

    def _initializer(self, numbers: np.ndarray[Any, Any], name: str) -> str:
        """Add an initializer, and return its name, which contains ``name``."""
        tensor = onnx.numpy_helper.from_array(numbers, _graph_utils.generate_graph_name(name))
        self.base.graph.initializer.append(tensor)
        return str(tensor.name)


class _BinaryOp(Block):
    _operator: str

    def build(self, input_name1: str, input_name2: str) -> str:
        return self._node(self._operator, [input_name1, input_name2])


class _UnaryOp(Block):
    _operator: str
    _attributes: Mapping[str, Any] = {}

    def build(self, input_name: str) -> str:
        return self._node(self._operator, [input_name], **self._attributes)


class _Reduction(_UnaryOp):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._attributes = {"keepdims": keepdims}


def _block_of(base: type[B], operator: str, words: str) -> type[B]:
    """Return the class of blocks that append a node of ``operator``; ``words`` is its docstring."""
    members = {"__doc__": words, "__module__": __name__, "_operator": operator}
    return cast("type[B]", type(operator, (base,), members))


Add = _block_of(_BinaryOp, "Add", "The sum of two values.")
Sub = _block_of(_BinaryOp, "Sub", "The difference of two values.")
Mul = _block_of(_BinaryOp, "Mul", "The product of two values.")
Div = _block_of(_BinaryOp, "Div", "The quotient of two values.")
Sigmoid = _block_of(_UnaryOp, "Sigmoid", "The logistic function.")
Log = _block_of(_UnaryOp, "Log", "The natural logarithm.")
Neg = _block_of(_UnaryOp, "Neg", "The negated value.")
Abs = _block_of(_UnaryOp, "Abs", "The absolute value.")
ReduceMean = _block_of(_Reduction, "ReduceMean", "The mean of all elements.")
ReduceSum = _block_of(_Reduction, "ReduceSum", "The sum of all elements.")


class Pow(Block):
    """A value to a power."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        return self._node("Pow", [pow_input_name, self._number(self._exponent, "pow_exponent")])


class Constant(Block):
    """A float as an initializer of shape [1]."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return self._number(self._value, "initializer")


class SequenceConstruct(Block):
    """A sequence of values."""

    def build(self, *sequence_input_names: str) -> str:
        return self._node("SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """The L2 norm over all elements of several values, of shape [1]."""

    def build(self, *reduce_node_input_names: str) -> str:
        if not reduce_node_input_names:
            raise CompatibilityError("ReduceAllL2 requires at least one value")
        squares = [self._node("ReduceSumSquare", [name], keepdims=0) for name in reduce_node_input_names]
        total = squares[0] if len(squares) == 1 else self._node("Sum", squares)
        shape = self._initializer(np.array([1], np.int64), "reducealll2_shape")
        return self._node("Reshape", [self._node("Sqrt", [total]), shape], "reducealll2_output")


class Clip(Block):
    """A value clipped between two bounds, each optional."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._min, self._max = clip_min, clip_max

    def build(self, clip_input_name: str) -> str:
        bounds = [
            "" if value is None else self._initializer(np.array(value, np.float32), name)  # a scalar, by ONNX
            for value, name in ((self._min, "clip_min"), (self._max, "clip_max"))
        ]
        return self._node("Clip", [clip_input_name, *bounds])


class PassThrough(Block):
    """A block that returns its inputs unchanged."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        return input_names


class InputLike(Block):
    """A new input of the model, with the type and shape of an existing input or output.

    Args:
        like: the name of the existing input or output.
    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        graph = self.base.graph
        model = next((v for v in (*graph.input, *graph.output) if v.name == self._like), None)
        if model is None:
            raise LookupError(f"Could not find input or output with name {self._like}")
        new = onnx.ValueInfoProto(name=input_name or _graph_utils.generate_graph_name("input"), type=model.type)
        graph.input.append(new)
        return str(new.name)


class LabelEncoder(Block):
    """A lookup of values in a table: ai.onnx.ml's LabelEncoder, with its attributes."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: list[float] | None = None,
        keys_int64s: list[int] | None = None,
        keys_strings: list[str] | None = None,
        values_floats: list[float] | None = None,
        values_int64s: list[int] | None = None,
        values_strings: list[str] | None = None,
    ) -> None:
        super().__init__()
        self._attributes = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }

    def build(self, label_encoder_input_name: str) -> str:
        if not any(o.domain == "ai.onnx.ml" for o in self.base.opset_import):
            self.base.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
        given = {k: v for k, v in self._attributes.items() if v is not None}
        return self._node(
            "LabelEncoder", [label_encoder_input_name], "label_encoder.output", domain="ai.onnx.ml", **given
        )


class Cast(Block):
    """A value cast to another element type.

    Args:
        to: the element type, a constant of ``onnx.TensorProto``.
    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        return self._node("Cast", [cast_input_name], "cast.output", to=self._to)


class Linear(Block):
    """A linear layer with a new weight and, with ``bias``, a new bias; both are drawn from a normal distribution."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._in_features, self._out_features, self._bias = in_features, out_features, bias
        self._alpha, self._beta = alpha, beta

    def build(self, linear_input_name: str) -> str:
        inputs = [linear_input_name, self._drawn("linear.weight", self._in_features, self._out_features)]
        if self._bias:
            inputs.append(self._drawn("linear.bias", self._out_features))
        return self._node("Gemm", inputs, "linear.output", alpha=self._alpha, beta=self._beta)

    def _drawn(self, name: str, *shape: int) -> str:
        # numpy's global generator, which np.random.seed sets, as in onnxruntime-training
        return self._initializer(np.random.randn(*shape).astype(np.float32), name)
