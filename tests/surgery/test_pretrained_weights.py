"""Weights in Hugging Face's format go into finished files: the result is what an exporter writes for these weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
import safetensors.numpy
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static

from gradgraph import surgery
from gradgraph.errors import ArgumentError, BuildError, DataError
from gradgraph.surgery.folded_norms import Candidate, Norm, folded

WORDS, WIDTH, KEYS, INNER, LAYERS = 24, 16, 8, 48, 2
BLOCK = 16
IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
Tensors = dict[str, np.ndarray]


def tensors(seed: int, tied: bool = False, prefix: str = "model.") -> Tensors:
    """The weights of a small language model under Hugging Face's names."""
    rng = np.random.default_rng(seed)

    def drawn(*sizes: int) -> np.ndarray:
        return (rng.normal(size=sizes) / 4).astype(np.float32)

    found = {f"{prefix}embed_tokens.weight": drawn(WORDS, WIDTH), f"{prefix}norm.weight": 1 + drawn(WIDTH)}
    for i in range(LAYERS):
        layer = f"{prefix}layers.{i}"
        for name, size in (("q", WIDTH), ("k", KEYS), ("v", KEYS)):
            found[f"{layer}.self_attn.{name}_proj.weight"] = drawn(size, WIDTH)
            found[f"{layer}.self_attn.{name}_proj.bias"] = drawn(size)
        found[f"{layer}.self_attn.o_proj.weight"] = drawn(WIDTH, WIDTH)
        found[f"{layer}.mlp.gate_proj.weight"] = drawn(INNER, WIDTH)
        found[f"{layer}.mlp.up_proj.weight"] = drawn(INNER, WIDTH)
        found[f"{layer}.mlp.down_proj.weight"] = drawn(WIDTH, INNER)
        found[f"{layer}.input_layernorm.weight"] = 1 + drawn(WIDTH)
        found[f"{layer}.post_attention_layernorm.weight"] = 1 + drawn(WIDTH)
    return found if tied else found | {"lm_head.weight": drawn(WORDS, WIDTH)}


class Exporter:
    """Writes a file as onnxruntime-genai's builder names and stores weights.

    ``form`` is ``float``, ``float16``, ``int4``, ``int8``, ``int4 asymmetric`` or ``QDQ``.
    """

    def __init__(self, given: Tensors, form: str, tied: bool, offset: float = 0.0) -> None:
        self.given, self.form, self.tied, self.offset = given, form, tied, offset
        self.producer = "onnxruntime-genai"
        self.nodes: list[Any] = []
        self.stored: dict[str, Any] = {}
        self.type = np.float16 if form == "float16" else np.float32

    def model(self) -> onnx.ModelProto:
        x = self.embedding()
        for i in range(LAYERS):
            x = self.layer(i, x)
        x = self.norm(f"model.layers.{LAYERS}.final_norm_layernorm", "model.norm", x)
        self.product("lm_head", self.head(), x, "logits")
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))
        graph = helper.make_graph(
            self.nodes, "g",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
            [helper.make_tensor_value_info("logits", kind, ["batch", "length", WORDS])],
            [t if isinstance(t, onnx.TensorProto) else numpy_helper.from_array(t, n) for n, t in self.stored.items()],
        )  # fmt: skip
        domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=domains, ir_version=10, producer_name=self.producer)

    def head(self) -> np.ndarray:
        return self.given["model.embed_tokens.weight" if self.tied else "lm_head.weight"]

    def add(self, kind: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        scopes = {"embedded": "/model/embed_tokens", "logits": "/lm_head"}
        scope = scopes.get(output, f"/{output.removesuffix('.y')}")
        self.nodes.append(helper.make_node(kind, inputs, [output], f"{scope}/{kind}", domain=domain, **attributes))
        return output

    def store(self, name: str, array: np.ndarray) -> str:
        self.stored[name] = array.astype(self.type) if array.dtype.kind == "f" else array
        return name

    def embedding(self) -> str:
        if not self.tied or self.form == "QDQ":
            table = self.store("model.embed_tokens.weight", self.given["model.embed_tokens.weight"])
        elif self.form in ("float", "float16"):
            self.store("lm_head.MatMul.weight", self.given["model.embed_tokens.weight"].T)
            table = self.add("Transpose", ["lm_head.MatMul.weight"], "embedding", perm=[1, 0])
        else:
            names = self.packed("lm_head", self.head())
            bits = 8 if self.form == "int8" else 4
            self.stored["flat"] = np.array([WORDS, WIDTH * bits // 8])
            rows = self.add("Reshape", [names[0], "flat"], "rows")
            return self.add("GatherBlockQuantized", [rows, "input_ids", *names[1:]], "embedded", "com.microsoft",
                            bits=bits, block_size=BLOCK, gather_axis=0, quantize_axis=1)  # fmt: skip
        return self.add("Gather", [table, "input_ids"], "embedded")

    def layer(self, i: int, x: str) -> str:
        given, ours = f"model.layers.{i}", f"model.layers.{i}"
        y = self.norm(f"{ours}.input_layernorm", f"{given}.input_layernorm", x)
        names = [f"{given}.self_attn.{n}_proj" for n in "qkv"]
        joined = {part: np.concatenate([self.given[f"{n}.{part}"] for n in names]) for part in ("weight", "bias")}
        y = self.product(f"{ours}.attn.qkv_proj", joined["weight"], y)
        y = self.add("Add", [y, self.store(f"{ours}.attn.qkv_proj.Add.bias", joined["bias"])], f"{ours}.qkv")
        self.stored[f"{ours}.sizes"] = np.array([WIDTH, KEYS, KEYS])
        parts = [f"{ours}.{n}" for n in "qkv"]
        self.nodes.append(helper.make_node("Split", [y, f"{ours}.sizes"], parts, f"/{ours}/Split", axis=-1))
        y = self.add("Concat", parts[1:], f"{ours}.kv", axis=-1)
        y = self.product(f"{ours}.attn.o_proj", self.given[f"{given}.self_attn.o_proj.weight"],
                         self.add("Mul", [y, parts[0]], f"{ours}.mixed"))  # fmt: skip
        x = self.add("Add", [x, y], f"{ours}.sum")
        y = self.norm(f"{ours}.post_attention_layernorm", f"{given}.post_attention_layernorm", x)
        gate = self.product(f"{ours}.mlp.gate_proj", self.given[f"{given}.mlp.gate_proj.weight"], y)
        up = self.product(f"{ours}.mlp.up_proj", self.given[f"{given}.mlp.up_proj.weight"], y)
        y = self.add("Mul", [self.add("Sigmoid", [gate], f"{ours}.opened"), up], f"{ours}.inner")
        y = self.product(f"{ours}.mlp.down_proj", self.given[f"{given}.mlp.down_proj.weight"], y)
        return self.add("Add", [x, y], f"{ours}.output")

    def norm(self, ours: str, given: str, x: str) -> str:
        weight = self.store(f"{ours}.weight", self.given[f"{given}.weight"] + np.float32(self.offset))
        return self.add("SimplifiedLayerNormalization", [x, weight], f"{ours}.y", axis=-1, epsilon=1e-5)

    def product(self, name: str, weight: np.ndarray, x: str, output: str = "") -> str:
        """A product with a weight (outputs, inputs)."""
        output = output or f"{name}.y"
        if self.form in ("float", "float16"):
            return self.add("MatMul", [x, self.store(f"{name}.MatMul.weight", weight.T)], output)
        if self.form == "QDQ":
            q, scales = rounded(weight.T.reshape(-1, BLOCK, len(weight)), 1)
            self.stored[f"{name}.MatMul.weight_quantized"] = helper.make_tensor(
                f"{name}.MatMul.weight_quantized", TensorProto.INT4, weight.T.shape, q.reshape(weight.T.shape).flatten()
            )
            self.stored[f"{name}.scale"] = scales[:, 0]
            read = [f"{name}.MatMul.weight_quantized", f"{name}.scale"]
            wide = self.add("DequantizeLinear", read, f"{name}.wide", axis=0, block_size=BLOCK)
            return self.add("MatMul", [x, wide], output)
        bits = 8 if self.form == "int8" else 4
        return self.add("MatMulNBits", [x, *self.packed(name, weight)], output, "com.microsoft", K=weight.shape[1],
                        N=len(weight), bits=bits, block_size=BLOCK)  # fmt: skip

    def packed(self, name: str, weight: np.ndarray) -> list[str]:
        bits = 8 if self.form == "int8" else 4
        blocks = weight.reshape(len(weight), -1, BLOCK)
        names = [f"{name}.MatMul.weight_Q{bits}", f"{name}.MatMul.weight_scales", f"{name}.MatMul.weight_zp"]
        if "asymmetric" in self.form:
            low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
            scales = (high - low) / 15
            points = np.rint(-low / scales)
            q = np.clip(np.rint(blocks / scales[..., None]) + points[..., None], 0, 15).astype(np.uint8)
            self.stored[names[2]] = in_bytes(np.pad(points.astype(np.uint8), ((0, 0), (0, points.shape[1] % 2))), 4)
        else:
            q, scales = rounded(blocks, 2, 2 ** (bits - 1))
            q, scales = (q.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8), scales[..., 0]
        self.stored[names[0]], self.stored[names[1]] = in_bytes(q, bits), scales.astype(np.float32)
        return names if "asymmetric" in self.form else names[:2]


def rounded(blocks: np.ndarray, axis: int, half: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """The integers of symmetric blocks along an axis, and their scales."""
    scales = np.abs(blocks).max(axis, keepdims=True) / (half - 1)
    return np.rint(blocks / scales).astype(np.int8), scales


def in_bytes(q: np.ndarray, bits: int) -> np.ndarray:
    return q if bits == 8 else (q[..., ::2] | (q[..., 1::2] << 4)).astype(np.uint8)


def run(model: onnx.ModelProto) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"input_ids": IDS})[0], np.float32)


def folder(path: Path, given: Tensors, shards: int = 1, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    if shards == 1:
        safetensors.numpy.save_file(given, path / "model.safetensors")
        return path
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(given)}
    for file in {*places.values()}:
        safetensors.numpy.save_file({n: a for n, a in given.items() if places[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


FORMS = {"float": 0.0, "float16": 1e-3, "int4": 0.12, "int8": 0.01, "int4 asymmetric": 0.12, "QDQ": 0.12}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_the_file_is_that_of_the_exporter(form: str, tied: bool, tmp_path: Path, caplog: Any) -> None:
    """Each weight is stored once, and as before; integers round the new weights as finely as the exporter's."""
    new = tensors(1, tied)
    before, wanted = (Exporter(t, form, tied).model() for t in (tensors(0, tied), new))
    errors: dict[str, float] = {}
    with caplog.at_level(logging.INFO, "gradgraph.surgery"):
        found = surgery.load_weights(before, folder(tmp_path / "hf", new, 1 + (form == "float")), errors=errors)
    stored = {t.name: (t.data_type, [*t.dims]) for t in found.graph.initializer}
    assert stored == {t.name: (t.data_type, [*t.dims]) for t in wanted.graph.initializer}
    scale = np.abs(run(wanted)).max()
    assert np.abs(run(before) - run(wanted)).max() > 0.3 * scale
    near = FORMS[form]
    exact = run(Exporter(new, "float", tied).model())
    if near == 0.0:
        np.testing.assert_array_equal(run(found), run(wanted))
    else:
        rounding = [np.linalg.norm(run(model) - exact) for model in (found, wanted)]
        assert rounding[0] < max(1.5 * rounding[1], near / 10 * np.linalg.norm(exact))
    count = len(new)
    assert f"took {count} of {count} tensors for " in caplog.text
    layers = 5 * LAYERS + 1
    assert len(errors) == (0 if form.startswith("float") else layers)
    assert all(0 < error < near for error in errors.values())


def test_bfloat16_and_another_beginning_of_names(tmp_path: Path) -> None:
    import ml_dtypes

    new = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors(1, prefix="model.language_model.").items()}
    vision = {"model.vision_tower.layers.0.self_attn.o_proj.weight": np.ones((3, 3), np.float32)}
    model = Exporter(tensors(0), "float", False).model()
    path = folder(tmp_path / "hf", new | vision)
    with pytest.raises(DataError, match="1 tensor has no weight"):
        surgery.load_weights(model, path)
    found = surgery.load_weights(model, path, strict=False)
    plain = {n.replace("language_model.", ""): a.astype(np.float32) for n, a in new.items()}
    np.testing.assert_array_equal(run(found), run(Exporter(plain, "float", False).model()))


def test_norms_that_multiply_by_one_more(tmp_path: Path) -> None:
    """As those of Gemma: the folder says so."""
    old, new = ({n: a - ("norm" in n) for n, a in tensors(seed).items()} for seed in (0, 1))
    model, wanted = (Exporter(t, "float", False, 1.0).model() for t in (old, new))
    found = surgery.load_weights(model, folder(tmp_path / "hf", new, model_type="gemma2"))
    np.testing.assert_array_equal(run(found), run(wanted))
    with pytest.raises(DataError, match=r"seem to be 1 \+ those"):
        surgery.load_weights(model, folder(tmp_path / "no", new))


def test_norms_of_an_unknown_program_need_the_weights_of_the_export(tmp_path: Path) -> None:
    """It may store 1 + weight, as the builder does, or the weight, as PyTorch's exporter does."""
    old, new = ({n: a - ("norm" in n) for n, a in tensors(seed).items()} for seed in (0, 1))
    for path, given in (("old", old), ("new", new)):
        folder(tmp_path / path, given, model_type="gemma2")
    exporter = Exporter(old, "float", False, 1.0)
    exporter.producer = "onnx.quantize"
    model = exporter.model()
    with pytest.raises(DataError, match="may have computed weights"):
        surgery.load_weights(model, tmp_path / "new")
    found = surgery.load_weights(model, tmp_path / "new", exported_from=tmp_path / "old")
    np.testing.assert_array_equal(run(found), run(Exporter(new, "float", False, 1.0).model()))


def test_norms_of_pytorch_that_a_quantiser_passed_on_are_the_weights(tmp_path: Path) -> None:
    """The newer exporter marks its nodes, whatever program writes the file afterwards."""
    old, new = tensors(0), tensors(1)
    exporter = Exporter(old, "float", False)
    exporter.producer = "onnx.quantize"
    model = exporter.model()
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value="%mul : aten.mul.Tensor")
    found = surgery.load_weights(model, folder(tmp_path / "hf", new, model_type="gemma2"))
    np.testing.assert_array_equal(run(found), run(Exporter(new, "float", False).model()))


def test_a_table_that_encoder_and_decoder_share(tmp_path: Path) -> None:
    """As in folders of T5 and BART."""
    new = tensors(1)
    shared = {n.replace("embed_tokens", "shared"): a for n, a in new.items()}
    found = surgery.load_weights(Exporter(tensors(0), "float", False).model(), folder(tmp_path / "hf", shared))
    np.testing.assert_array_equal(run(found), run(Exporter(new, "float", False).model()))


def without(given: Tensors, *ends: str) -> Tensors:
    return {n: a for n, a in given.items() if not n.endswith(ends)}


BAD = {
    "has shape": lambda t: t | {"model.layers.1.mlp.down_proj.weight": np.ones((16, 47), np.float32)},
    "2 weights of the model have no tensor": lambda t: without(t, "o_proj.weight"),
    "none of the 1 tensor": lambda t: {"conv1.weight": np.ones((3, 3), np.float32)},
    "1 tensor has no weight": lambda t: t | {"model.layers.2.mlp.down_proj.weight": np.ones((16, 48), np.float32)},
    "contains NaN": lambda t: t | {"lm_head.weight": np.full((WORDS, WIDTH), np.nan, np.float32)},
}


@pytest.mark.parametrize("says", BAD)
def test_what_does_not_fit_is_refused(says: str, tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", BAD[says](tensors(1)))
    with pytest.raises(DataError, match=says):
        surgery.load_weights(Exporter(tensors(0), "int4", False).model(), path, out=tmp_path / "new.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["hf"]


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    model, path = Exporter(tensors(0), "float", False).model(), folder(tmp_path / "hf", tensors(1), 2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DataError, match=r"model-00002-of-00002\.safetensors: it does not exist"):
        surgery.load_weights(model, path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.safetensors file; pass a folder with model\.safetensors"):
        surgery.load_weights(model, tmp_path / "empty")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is a pickle, which is never loaded"):
        surgery.load_weights(model, tmp_path / "empty")
    safetensors.numpy.save_file(tensors(1), tmp_path / "empty" / "adapter_model.safetensors")
    with pytest.raises(DataError, match="contains an adapter"):
        surgery.load_weights(model, tmp_path / "empty")


@pytest.mark.parametrize("of_genai", [True, False])
def test_another_family_or_other_settings_are_refused(of_genai: bool, tmp_path: Path) -> None:
    """What no weight shows, by the configurations of both folders."""
    (tmp_path / "llm").mkdir()
    onnx.save(Exporter(tensors(0), "float", False).model(), tmp_path / "llm" / "model.onnx")
    decoder = {"filename": "model.onnx", "num_attention_heads": 4, "head_size": 4}
    own = {"model": {"type": "llama", "decoder": decoder}} if of_genai else {"model_type": "llama", "head_dim": 4}
    (tmp_path / "llm" / ("genai_config.json" if of_genai else "config.json")).write_text(json.dumps(own))
    model = tmp_path / "llm" / "model.onnx"
    with pytest.raises(DataError, match="weights of type gemma2, but the model has type llama"):
        surgery.load_weights(model, folder(tmp_path / "gemma", tensors(1), model_type="gemma2"))
    with pytest.raises(DataError, match=r"has head_dim 8 in config\.json, but the model has 4"):
        surgery.load_weights(model, folder(tmp_path / "wide", tensors(1), head_dim=8))
    found = surgery.load_weights(model, folder(tmp_path / "hf", tensors(1), head_dim=4))
    np.testing.assert_array_equal(run(found), run(Exporter(tensors(1), "float", False).model()))


def test_a_tied_file_takes_no_untied_folder(tmp_path: Path) -> None:
    model = Exporter(tensors(0, tied=True), "int4", True).model()
    with pytest.raises(DataError, match=r"stores 'lm_head.weight' and .* once, but the file has different tensors"):
        surgery.load_weights(model, folder(tmp_path / "hf", tensors(1)))
    twice = tensors(1, tied=True)
    again = twice | {"lm_head.weight": twice["model.embed_tokens.weight"]}
    found = surgery.load_weights(model, folder(tmp_path / "same", again))
    np.testing.assert_array_equal(run(found), run(surgery.load_weights(model, folder(tmp_path / "tied", twice))))


# --- BatchNormalizations that layers contain ----------------------------------------------------------------------


def norm(module: str, channels: int) -> Norm:
    return Norm(module, (), *np.ones((4, channels)))


@pytest.mark.parametrize(
    ("convs", "norms", "wanted"),
    [
        ("conv1:4 b.0.conv1:4 b.0.conv2:4", "b.0.bn2:4 bn1:4 b.0.bn1:4", "bn1 b.0.bn1 b.0.bn2"),
        ("f.0.0:4 f.1.conv.0.0:4 f.1.conv.1:8", "f.0.1:4 f.1.conv.0.1:4 f.1.conv.2:8", "f.0.1 f.1.conv.0.1 f.1.conv.2"),
        ("b.conv_pw:8 b.conv_dw:8 b.conv_pwl:4", "b.bn1:8 b.bn2:8 b.bn3:4", "b.bn1 b.bn2 b.bn3"),
        ("b.conv_dw:8 b.se.fc:2+ b.conv_pw:4", "b.bn1:8 b.bn2:4", "b.bn1 - b.bn2"),
        ("f.0:4+ f.3:4+", "f.1:4 f.4:4", "f.1 f.4"),
        ("d.conv1:8", "d.norm2:8", "d.norm2"),
        ("conv1.0:4 conv1.3:4 conv1.6:8 b.conv1:8", "conv1.1:4 conv1.4:4 bn1:8 b.bn1:8", "conv1.1 conv1.4 bn1 b.bn1"),
        ("b.conv1:4 b.conv2:4 b.up:4/T", "b.bn1:4 b.bn2:4", "b.bn1 b.bn2 -"),
        ("up1:8/T up2:4/T fc:4+/G", "bn1:8 bn2:4", "bn1 bn2 -"),
        ("conv:4 fc1:8+/G fc2:5+/G", "norm1:4 norm2:8 norm3:5", "norm1 norm2 norm3"),
        ("h.conv:8+ h.fc:4/G", "h.bn:4", "- h.bn"),
    ],
    ids=["resnet", "mobilenet v2", "efficientnet", "squeeze", "vgg", "densenet", "deep stem", "upsampling", "generator",
         "linear", "linear only"],
)  # fmt: skip
def test_the_layer_of_each_norm_is_found(convs: str, norms: str, wanted: str) -> None:
    kinds = {"": "Conv", "T": "ConvTranspose", "G": "Gemm"}
    parts = [(name, *size.partition("/")[::2]) for name, _, size in (conv.partition(":") for conv in convs.split())]
    given = [Candidate(name, int(n.rstrip("+")), "+" in n, kind=kinds[kind]) for name, n, kind in parts]
    found = folded(given, [norm(name, int(size)) for name, _, size in (n.partition(":") for n in norms.split())])
    assert [found[i].module if i in found else "-" for i in range(len(given))] == wanted.split()


def test_norms_without_an_order_are_refused() -> None:
    with pytest.raises(DataError, match="it is unknown which layers"):
        folded([Candidate("b.first", 4), Candidate("b.second", 4)], [norm("b.left", 4), norm("b.right", 4)])
    with pytest.raises(DataError, match="has 5 channels"):
        folded([Candidate("b.conv1", 4)], [norm("b.bn1", 5)])


@pytest.mark.parametrize("option", [{"names": {"a": "b"}}, {"turned": False}], ids=["names", "turned"])
def test_options_of_names_are_refused_for_a_folder(option: dict[str, Any], tmp_path: Path) -> None:
    model = Exporter(tensors(0), "float", tied=False).model()
    with pytest.raises(ArgumentError, match=f"{next(iter(option))} does not apply .* by module"):
        surgery.load_weights(model, folder(tmp_path / "hf", tensors(1)), **option)


@pytest.mark.parametrize("option", [{"epsilon": 1e-5}, {"exported_from": {}}], ids=["epsilon", "exported_from"])
def test_options_of_modules_are_refused_for_names_of_the_model(option: dict[str, Any]) -> None:
    model = Exporter(tensors(0), "float", tied=False).model()
    own = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    with pytest.raises(ArgumentError, match=f"{next(iter(option))} does not apply .* by name"):
        surgery.load_weights(model, own, **option)


def test_buffers_of_a_state_dict_are_not_missed_in_the_model() -> None:
    """Also if all names are the model's own."""
    model = Exporter(tensors(0), "float", tied=False).model()
    own = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    found = surgery.load_weights(model, own | {"bn.num_batches_tracked": np.array(3)})
    assert [t.name for t in found.graph.initializer] == [*own]
    for name in ("bn.running_mean", "attn.bias"):
        with pytest.raises(DataError, match="1 tensor of the file is not in the model"):
            surgery.load_weights(model, own | {name: np.zeros(3, np.float32)})


# --- integers of QDQ ---------------------------------------------------------------------------------------------


class Images(CalibrationDataReader):
    """Calibration data: images from a normal distribution."""

    def __init__(self) -> None:
        self.rest = iter(np.random.default_rng(5).normal(size=(8, 2, 3, 8, 8)).astype(np.float32))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(({"x": x} for x in self.rest), None)


def convolutions(seed: int) -> tuple[onnx.ModelProto, Tensors]:
    """Two convolutions with biases, in floats, and their weights."""
    rng = np.random.default_rng(seed)
    sizes = {"first.weight": (6, 3, 3, 3), "first.bias": (6,), "second.weight": (4, 6, 1, 1), "second.bias": (4,)}
    given = {n: (rng.normal(size=s) * 0.3 * (1 + seed)).astype(np.float32) for n, s in sizes.items()}
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 19]> g (float[2, 3, 8, 8] x) => (float[2, 4, 8, 8] y) {
        a = Conv<pads=[1, 1, 1, 1]>(x, w, b) r = Relu(a) y = Conv(r, v, c) }"""
    )
    for node, names in zip([model.graph.node[0], model.graph.node[2]], (("w", "b"), ("v", "c")), strict=True):
        module = "first" if names[0] == "w" else "second"
        node.name, node.input[1:] = f"/{module}/Conv", [f"{module}.weight", f"{module}.bias"]
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in given.items())
    return model, given


@pytest.mark.parametrize("given", [("weight", "bias"), ("weight",)], ids=["all", "weights only"])
@pytest.mark.parametrize("by_channel", [True, False])
def test_scales_of_biases_are_those_of_data_and_new_weights(
    by_channel: bool, given: tuple[str, ...], tmp_path: Path
) -> None:
    """As the kernels of integers assume, which do not read the scales of biases."""
    (old, _), (_, new) = convolutions(0), convolutions(1)
    onnx.save(old, tmp_path / "float.onnx")
    quantize_static(str(tmp_path / "float.onnx"), str(tmp_path / "int8.onnx"), Images(), per_channel=by_channel)
    kept = {n: a for n, a in new.items() if n.endswith(given)}
    found = surgery.load_weights(tmp_path / "int8.onnx", kept, strict=len(given) == 2)
    stored = {t.name: numpy_helper.to_array(t) for t in found.graph.initializer}
    readers = {n.output[0]: n for n in found.graph.node if n.op_type == "DequantizeLinear"}
    for node in [n for n in found.graph.node if n.op_type == "Conv"]:
        of_data, of_weight, of_bias = (stored[readers[name].input[1]] for name in node.input)
        np.testing.assert_allclose(of_bias, of_data * of_weight, rtol=1e-6)
    images = np.random.default_rng(6).normal(size=(2, 3, 8, 8)).astype(np.float32)
    levels = (ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    outputs = [optimised(found, images, level) for level in levels]
    wanted = {n: new[n] if n in kept else a for n, a in convolutions(0)[1].items()}
    for tensor in old.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(wanted[tensor.name], tensor.name))
    exact = optimised(old, images, levels[0])
    scale = stored[[n for n in found.graph.node if n.op_type == "DequantizeLinear"][-1].input[1]]
    assert np.abs(outputs[0] - outputs[1]).max() <= 2.01 * scale
    inside = np.abs(exact) < 0.9 * 127 * scale  # ranges of data are those of the old weights
    assert np.abs(outputs[0] - exact)[inside].mean() < 0.1 * np.abs(exact).mean()


def optimised(model: onnx.ModelProto, x: np.ndarray, level: Any) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("form", ["int4", "int8", "int4 asymmetric"])
def test_a_table_of_integers_that_is_not_tied(form: str, tmp_path: Path) -> None:
    """GatherBlockQuantized with integers of its own, beside a last layer of others."""

    class Untied(Exporter):
        def head(self) -> np.ndarray:
            return self.given["lm_head.weight"]

        def embedding(self) -> str:
            names = self.packed("model.embed_tokens", self.given["model.embed_tokens.weight"])
            bits = 8 if self.form == "int8" else 4
            self.stored[names[0]] = self.stored[names[0]].reshape(WORDS, -1)
            return self.add("GatherBlockQuantized", [names[0], "input_ids", *names[1:]], "embedded", "com.microsoft",
                            bits=bits, block_size=BLOCK, gather_axis=0, quantize_axis=1)  # fmt: skip

    new, errors = tensors(1), dict[str, float]()
    before, wanted = (Untied(t, form, tied=False).model() for t in (tensors(0), new))
    found = surgery.load_weights(before, folder(tmp_path / "hf", new), errors=errors)
    assert [t.name for t in found.graph.initializer] == [t.name for t in wanted.graph.initializer]
    assert 0 < errors["model.embed_tokens"] < FORMS[form]
    exact = run(Exporter(new, "float", tied=False).model())
    rounding = [np.linalg.norm(run(model) - exact) for model in (found, wanted)]
    assert rounding[0] < 1.5 * rounding[1]


def test_a_table_of_integers_without_scales_is_refused(tmp_path: Path) -> None:
    """As onnxruntime-genai's builder 0.18 writes it with is_symmetric=false; onnxruntime does not open the file."""
    model = Exporter(tensors(0, tied=True), "int4", tied=True).model()
    (table,) = (node for node in model.graph.node if node.op_type == "GatherBlockQuantized")
    del table.input[2:]
    with pytest.raises(BuildError, match=r"the table of '.*' is computed"):
        surgery.load_weights(model, folder(tmp_path / "hf", tensors(1, tied=True), tie_word_embeddings=True))
