"""Models with gigabytes of external data, written with at most one weight in memory.

For example ``python -m benchmarks.large_models backbone big.onnx --gigabytes 2.4``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

TIME, CLASSES = 16, 10
PAGE = 4096


class Writer:
    """A model under construction; added weights are written to ``<name>.data`` next to ``path`` immediately."""

    def __init__(self, path: Path) -> None:
        self.path, self.nodes = path, list[onnx.NodeProto]()
        self.weights = list[onnx.TensorProto]()
        self.rng = np.random.default_rng(0)
        self._data = path.with_name(f"{path.name}.data").open("wb")

    def weight(self, name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
        tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(values.dtype), dims=values.shape)
        if values.nbytes < 1024:
            tensor.raw_data = values.tobytes()
        else:
            self._data.write(bytes(-self._data.tell() % PAGE))
            entry = {"location": Path(self._data.name).name, "offset": self._data.tell(), "length": values.nbytes}
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in entry.items():
                tensor.external_data.add(key=key, value=str(value))
            self._data.write(values.data)
        self.weights.append(tensor)
        return name

    def random(self, name: str, *shape: int) -> str:
        values = self.rng.standard_normal(shape, np.float32)
        values *= 1 / math.sqrt(shape[0])
        return self.weight(name, values)

    def constant(self, name: str, *shape: int, value: float = 0.0) -> str:
        return self.weight(name, np.full(shape, value, np.float32))

    def node(self, kind: str, inputs: Sequence[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def finish(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> None:
        graph = helper.make_graph(self.nodes, "large", inputs, outputs)
        graph.initializer.extend(self.weights)
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)], ir_version=8
        )
        self._data.close()
        self.path.write_bytes(model.SerializeToString())


def backbone(path: Path, gigabytes: float, layers: int = 20) -> None:
    """Write a float32 model of transformer blocks, with a small head (``head.weight``, ``head.bias``) on their mean."""
    width = max(8, round(math.sqrt(gigabytes * 1e9 / 4 / (12 * layers)) / 8) * 8)
    model = Writer(path)
    x = "x"
    sizes = model.weight("heads", np.array([0, TIME, 8, width // 8], np.int64))
    merged = model.weight("merged", np.array([0, TIME, width], np.int64))
    model.constant("scale", value=1 / math.sqrt(width / 8))
    for i in range(layers):
        at = f"layers.{i}"
        x = _attention(model, x, at, width, sizes, merged)
        x = _perceptron(model, x, at, width)
    pooled = model.node("ReduceMean", [x], "pooled", axes=[1], keepdims=0)
    head = [pooled, model.random("head.weight", width, CLASSES), model.constant("head.bias", CLASSES)]
    model.node("Gemm", head, "logits")
    model.node("ReduceSum", ["logits"], "total", keepdims=0)
    value = helper.make_tensor_value_info
    outputs = [value("logits", TensorProto.FLOAT, ["batch", CLASSES]), value("total", TensorProto.FLOAT, [])]
    model.finish([value("x", TensorProto.FLOAT, ["batch", TIME, width])], outputs)


def _norm(model: Writer, x: str, at: str, width: int) -> str:
    weights = [model.constant(f"{at}.weight", width, value=1.0), model.constant(f"{at}.bias", width)]
    return model.node("LayerNormalization", [x, *weights], f"{at}.out", axis=-1)


def _linear(model: Writer, x: str, at: str, *shape: int) -> str:
    y = model.node("MatMul", [x, model.random(f"{at}.weight", *shape)], f"{at}.product")
    return model.node("Add", [y, model.constant(f"{at}.bias", shape[1])], f"{at}.out")


def _attention(model: Writer, x: str, at: str, width: int, sizes: str, merged: str) -> str:
    normal = _norm(model, x, f"{at}.norm_1", width)
    parts = []
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        rows = model.node("Reshape", [_linear(model, normal, f"{at}.{part}", width, width), sizes], f"{at}.{part}.rows")
        parts.append(model.node("Transpose", [rows], f"{at}.{part}.heads", perm=order))
    q, k, v = parts
    scores = model.node("Mul", [model.node("MatMul", [q, k], f"{at}.qk"), "scale"], f"{at}.scores")
    mixed = model.node("MatMul", [model.node("Softmax", [scores], f"{at}.shares", axis=-1), v], f"{at}.mixed")
    rows = model.node("Transpose", [mixed], f"{at}.mixed_rows", perm=[0, 2, 1, 3])
    flat = model.node("Reshape", [rows, merged], f"{at}.mixed_flat")
    return model.node("Add", [x, _linear(model, flat, f"{at}.o", width, width)], f"{at}.attended")


def _perceptron(model: Writer, x: str, at: str, width: int) -> str:
    up = _linear(model, _norm(model, x, f"{at}.norm_2", width), f"{at}.up", width, 4 * width)
    down = _linear(model, model.node("Relu", [up], f"{at}.relu"), f"{at}.down", 4 * width, width)
    return model.node("Add", [x, down], f"{at}.end")


# --- a language model in 4 bits -------------------------------------------------------------------------------------

BLOCK = 32  # numbers per scale
WORDS, LENGTH = 32_000, 128
HEAD = 64


def language_model(path: Path, gigabytes: float, layers: int = 16, words: int = WORDS, length: int = LENGTH) -> None:
    """Write a Llama-like model with 4-bit products (MatMulNBits), without a cache or rotary positions."""
    # a layer has 16 width**2 weights of 5/8 byte with their scales; embeddings have 4 bytes per weight, the head 5/8
    a, b = layers * 16 * 5 / 8, words * (4 + 5 / 8)
    width = max(HEAD, round((math.sqrt(b * b + 4e9 * a * gigabytes) - b) / (2 * a) / HEAD) * HEAD)
    model = Writer(path)
    model.constant("scale", value=1 / math.sqrt(HEAD))
    model.weight("causal", np.triu(np.full((length, length), -1e9, np.float32), 1))
    model.weight("heads", np.array([0, length, width // HEAD, HEAD], np.int64))
    model.weight("merged", np.array([0, length, width], np.int64))
    x = model.node("Gather", [model.random("tokens.weight", words, width), "ids"], "embedded")
    for i in range(layers):
        at = f"layers.{i}"
        x = model.node(
            "Add", [x, _causal_attention(model, _rms(model, x, f"{at}.norm_1", width), at, width)], f"{at}.mid"
        )
        h = _rms(model, x, f"{at}.norm_2", width)
        gate, up = (_packed(model, h, f"{at}.{part}", width, 4 * width) for part in ("gate", "up"))
        open_ = model.node("Mul", [gate, model.node("Sigmoid", [gate], f"{at}.sigmoid")], f"{at}.silu")
        gated = model.node("Mul", [open_, up], f"{at}.gated")
        x = model.node("Add", [x, _packed(model, gated, f"{at}.down", 4 * width, width)], f"{at}.end")
    scores = _packed(model, _rms(model, x, "norm", width), "head", width, words)
    model.node("Reshape", [scores, model.weight("rows", np.array([-1, words], np.int64))], "logits")
    value = helper.make_tensor_value_info
    model.finish(
        [value("ids", TensorProto.INT64, ["batch", length])], [value("logits", TensorProto.FLOAT, ["tokens", words])]
    )


def words_and_length(path: Path) -> tuple[int, int]:
    """Return the vocabulary size and the tokens per row of a file that ``language_model`` wrote."""
    graph = onnx.load(path, load_external_data=False).graph
    of_words = graph.output[0].type.tensor_type.shape.dim[1].dim_value
    return of_words, graph.input[0].type.tensor_type.shape.dim[1].dim_value


def _rms(model: Writer, x: str, at: str, width: int) -> str:
    scale = model.constant(f"{at}.weight", width, value=1.0)
    return model.node("SimplifiedLayerNormalization", [x, scale], f"{at}.out", axis=-1, epsilon=1e-5)


def _packed(model: Writer, x: str, at: str, inputs: int, outputs: int) -> str:
    blocks = inputs // BLOCK
    # without 0, the mean is the zero point, 8; otherwise all tokens converge from layer to layer, and training fails
    low, high = model.rng.integers(1, 16, (2, outputs, blocks, BLOCK // 2), np.uint8)
    packed = model.weight(f"{at}.weight", low | high << 4)
    scales = model.weight(f"{at}.scales", np.full(outputs * blocks, 0.2 / math.sqrt(inputs), np.float32))
    sizes = {"K": inputs, "N": outputs, "bits": 4, "block_size": BLOCK}
    return model.node("MatMulNBits", [x, packed, scales], f"{at}.out", domain="com.microsoft", **sizes)


def _causal_attention(model: Writer, x: str, at: str, width: int) -> str:
    parts = []
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        rows = model.node("Reshape", [_packed(model, x, f"{at}.{part}", width, width), "heads"], f"{at}.{part}.rows")
        parts.append(model.node("Transpose", [rows], f"{at}.{part}.heads", perm=order))
    q, k, v = parts
    scores = model.node("Mul", [model.node("MatMul", [q, k], f"{at}.qk"), "scale"], f"{at}.scores")
    masked = model.node("Add", [scores, "causal"], f"{at}.masked")
    mixed = model.node("MatMul", [model.node("Softmax", [masked], f"{at}.shares", axis=-1), v], f"{at}.mixed")
    rows = model.node("Transpose", [mixed], f"{at}.mixed_rows", perm=[0, 2, 1, 3])
    return _packed(model, model.node("Reshape", [rows, "merged"], f"{at}.mixed_flat"), f"{at}.o", width, width)


MODELS = {"backbone": backbone, "int4": language_model}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=MODELS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--gigabytes", type=float, default=2.4)
    arguments = parser.parse_args()
    MODELS[arguments.kind](arguments.path, arguments.gigabytes)


if __name__ == "__main__":
    main()
