"""Models that onnxruntime-genai's builder writes here: a step computes what PyTorch does, and merged models generate.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import ChatBatches, Tokens
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.genai import GenaiDecoder
from gradgraph.chat.sampling import Sampling
from gradgraph.errors import BuildError, ModelError
from tests.surgery import language_families as families
from tests.surgery.beside_torch import IDS, RATE, STEPS, losses, of_torch, scores, with_adapter
from tests.surgery.family_tables import named

genai = pytest.importorskip("onnxruntime_genai", reason="in no extra; `make shipped-models` runs these tests with it")
torch = pytest.importorskip("torch", reason="the builder reads modules of PyTorch")
transformers = pytest.importorskip("transformers", reason="the builder reads files of transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."
TOKENS = [1, *(ord(letter) - ord(" ") + 3 for letter in TEXT), 2]
WRITTEN = ("llama", "qwen2", "phi3")


@pytest.fixture(scope="module", params=[(f, p) for f in WRITTEN for p in ("int4", "fp16")], ids="-".join)
def written(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """The precision, the network in PyTorch, and the folder that the builder has written."""
    family, precision = request.param
    folder = tmp_path_factory.mktemp(f"{family}-{precision}")
    network = families.write_network(family, folder / "hf")
    families.build(folder / "hf", folder / "out", precision, "cpu")
    return precision, network, folder / "out"


def test_scores_are_those_of_pytorch(written: tuple[str, Any, Path]) -> None:
    precision, network, folder = written
    ids = np.random.default_rng(0).integers(3, families.WORDS, (2, 17))
    wanted = of_torch(network, ids)
    model = surgery.language_model(gg.lora(folder / "model.onnx", "*attn*", rank=2))
    found = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(ids)
    assert np.abs(found - wanted).max() < (1e-3 if precision == "fp16" else 0.2)  # four bits are few


@pytest.mark.parametrize("kind", ["lora", "qalora"])
def test_a_merged_model_writes_its_text(kind: str, written: tuple[str, Any, Path], tmp_path: Path) -> None:
    precision, _, folder = written
    if kind == "qalora" and precision != "int4":
        with pytest.raises(BuildError, match="is not quantised"):
            gg.lora(folder / "model.onnx", "*attn*", kind=kind)
        return
    adapted = gg.lora(folder / "model.onnx", ["*attn*", "*mlp*", "*lm_head*"], rank=8, kind=kind)
    step = gg.build(surgery.language_model(adapted), gg.losses.cross_entropy(axis=-1), gg.optim.adam(5e-3))
    trainer = gg.Trainer(step, device="cpu")
    trainer.fit(surgery.next_tokens([TOKENS]), epochs=130, batch_size=1, progress=False)
    merged = surgery.merge_adapters(adapted, trainer.state_dict())
    for file in folder.glob("*.json"):
        shutil.copy(file, tmp_path)
    surgery.forget_sizes(merged, out=tmp_path / "model.onnx")
    text = in_a_plain_loop(tmp_path / "model.onnx")
    assert in_genai(tmp_path) == text != in_a_plain_loop(folder / "model.onnx"), precision
    if kind == "lora":
        assert text == TOKENS
        return
    ids = np.array([TOKENS])  # sums of blocks are too few here to learn a text by heart
    again = gg.build(surgery.language_model(gg.lora(merged, "*attn*", rank=2)), gg.losses.cross_entropy(axis=-1))
    expected = trainer.predict(ids)
    rounding = 1e-5 * np.abs(expected).max()  # the merged sums run in another order
    np.testing.assert_allclose(gg.Trainer(again, device="cpu").predict(ids), expected, rtol=0, atol=rounding)


def test_weights_of_another_training_are_quantised_again(written: tuple[str, Any, Path], tmp_path: Path) -> None:
    """To the integers and scales of the builder's own quantiser."""
    precision, network, folder = written
    family = next(f for f in WRITTEN if type(network).__name__ == families.FAMILIES[f][0])
    theirs = families.write_network(family, tmp_path / "hf", seed=1)
    wanted = of_torch(theirs, IDS)
    errors: dict[str, float] = {}
    found = surgery.load_weights(folder / "model.onnx", tmp_path / "hf", errors=errors)
    file = families.build(tmp_path / "hf", tmp_path / "out", precision, "cpu")
    rounding = np.abs(scores(families.adapted(file, family), IDS) - wanted).max()
    assert np.abs(scores(families.adapted(found, family), IDS) - wanted).max() < max(1.2 * rounding, 3e-6)
    assert bool(errors) == (precision == "int4")
    stored, own = ({t.name: t for t in model.graph.initializer} for model in (onnx.load(file), found))
    assert stored.keys() == own.keys()
    for name, tensor in stored.items():  # scales, too: they do not depend on the old weights
        np.testing.assert_array_equal(*map(onnx.numpy_helper.to_array, (own[name], tensor)), err_msg=name)
    assert all(0 < error < 0.12 for error in errors.values())


def in_a_plain_loop(path: Path) -> list[int]:
    return answered(Decoder(path, head_size=16))


def in_genai(folder: Path) -> list[int]:
    return answered(GenaiDecoder(folder))


def answered(decoder: Any) -> list[int]:
    (found,) = decoder.generated([TOKENS[:2]], {TOKENS[-1]}, Sampling(max_tokens=len(TOKENS) + 1))
    return [*TOKENS[:2], *found]


# --- every family ------------------------------------------------------------------------------------------------

HERE = families.of_this_builder()
TRAIN_IN_FLOAT32 = [f for f in HERE if f not in families.REFUSED or f in families.WRITTEN_BY_OLDER]


@pytest.fixture(scope="module", params=TRAIN_IN_FLOAT32)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Its name, the network in PyTorch, and the file of float32 for the CPU."""
    folder = tmp_path_factory.mktemp("family")
    network = families.write_network(request.param, folder / "hf")
    return request.param, network, families.build(folder / "hf", folder / "out", "fp32", "cpu")


def test_a_family_gives_the_scores_of_pytorch(family: tuple[str, Any, Path]) -> None:
    name, network, file = family
    if name in families.NOT_AS_IN_TORCH:
        pytest.skip("the file gives other scores in onnxruntime, too")
    found = scores(families.adapted(file, name), IDS)
    np.testing.assert_allclose(found, of_torch(network, IDS), atol=families.CLOSE.get(name, 3e-6))


def test_padding_on_the_left_changes_nothing(family: tuple[str, Any, Path]) -> None:
    name, _, file = family
    adapted = families.adapted(file, name)
    if name in families.HYBRID:
        with pytest.raises(BuildError, match="which would read padding"):
            surgery.language_model(adapted, keep="attention_mask")
        return
    padded = np.pad(IDS, ((0, 0), (4, 0)), constant_values=9)
    mask = np.pad(np.ones_like(IDS), ((0, 0), (4, 0)))
    np.testing.assert_allclose(scores(adapted, padded, mask)[:, 4:], scores(adapted, IDS), atol=3e-6)


EXPRESSIONS = {"rank_pattern": {r"layers\.[1-9]\..*(q|v)_proj": 2, "^model.embed_tokens": 5, "lm_head": 3},
               "alpha_pattern": {".*embed_tokens": 9, r"^model\.layers\.0\..*v_proj": 20}}  # fmt: skip
KINDS = {
    "lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True},
    "experts": {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["q_proj"]},
    "embeddings and heads": EXPRESSIONS | {"target_modules": ["embed_tokens", "lm_head", "q_proj", "v_proj", "o_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_peft_goes_both_ways(family: tuple[str, Any, Path], kind: str, tmp_path: Path) -> None:
    """Trained beside PyTorch, loaded into the file; saved from there, loaded beside PyTorch."""
    peft = pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
    name, network, file = family
    of_experts = ("gpt-oss", "lfm2 moe", "qwen3.5 moe")
    if kind == "experts" and name not in of_experts:
        pytest.skip("tried with mixtures of experts")
    if kind not in ("lora", "experts") and name not in ("llama", "llama 3", "phi3"):
        pytest.skip("other kinds are tried with one family that packs its projections, and one that does not")
    targets = families.PEFT_TARGETS.get(name, "all-linear")
    theirs = with_adapter(network, tmp_path / "theirs", **{"target_modules": targets} | KINDS[kind])
    wanted = of_torch(theirs, IDS)
    model = surgery.load_adapter(file, tmp_path / "theirs")
    if name not in families.NOT_AS_IN_TORCH:
        assert np.abs(wanted - of_torch(network, IDS)).max() > 0.05
        np.testing.assert_allclose(scores(model, IDS), wanted, atol=families.CLOSE.get(name, 3e-6))
    surgery.save_adapter(model, tmp_path / "ours", family=families.PEFT_FAMILY.get(name, "llama"))
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "ours").eval()
    np.testing.assert_allclose(of_torch(read, IDS), wanted, atol=3e-6)


def test_distillation_has_the_losses_of_torch(tmp_path: Path) -> None:
    """Of an adapter, from a network of another family: labels and scores of some tokens do not count."""
    pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
    files, networks = {}, {}
    for name in ("llama", "qwen3"):
        networks[name] = families.write_network(name, tmp_path / name)
        files[name] = families.build(tmp_path / name, tmp_path / f"{name}-out", "fp32", "cpu")
    theirs = with_adapter(networks["llama"], tmp_path / "adapter")
    student, teacher = surgery.load_adapter(files["llama"], tmp_path / "adapter"), networks["qwen3"]
    temperature, share, data = 3.0, 0.7, surgery.next_tokens(IDS)
    data["target"][:, :6] = -100
    taught = surgery.distill(
        surgery.language_model(student), surgery.language_model(files["qwen3"]), temperature, alpha=share
    )
    step = gg.build(taught, gg.losses.cross_entropy(axis=-1), gg.optim.adamw(RATE, weight_decay=0.0))
    trainer = gg.Trainer(step, device="cpu")
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], RATE, weight_decay=0.0)
    ids, target = torch.tensor(data["input_ids"]), torch.tensor(data["target"])
    found, wanted = [], []
    for _ in range(STEPS):
        mine, its = (network(ids).logits[target != -100] for network in (theirs, teacher))
        odds = [torch.log_softmax(scores / temperature, -1) for scores in (mine, its)]
        apart = torch.nn.functional.kl_div(odds[0], odds[1], log_target=True, reduction="batchmean")
        of_labels = torch.nn.functional.cross_entropy(mine, target[target != -100])
        loss = (1 - share) * of_labels + share * temperature**2 * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
        found.append(float(trainer.step(data)["loss"]))
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_weights_of_another_training_give_the_file_that_the_builder_writes(
    family: tuple[str, Any, Path], tmp_path: Path
) -> None:
    """Trained elsewhere, in a folder of transformers: each stored number is the builder's, and so are the scores."""
    name, _, file = family
    families.write_network(name, tmp_path / "hf", seed=1)
    for end in EXPERTS_IN_4_BITS:
        remove_tensors(tmp_path / "hf" / "model.safetensors", end)
    wanted = families.build(tmp_path / "hf", tmp_path / "out", "fp32", "cpu")
    found = surgery.load_weights(file, tmp_path / "hf", strict="qwen3.5" not in name)  # whose vision is another file
    stored, own = ({t.name: t for t in model.graph.initializer} for model in (onnx.load(wanted), found))
    assert stored.keys() == own.keys()
    for tensor in stored:
        arrays = [onnx.numpy_helper.to_array(x[tensor]) for x in (own, stored)]
        if tensor.endswith(".neg_exp_A"):  # NumPy's exponential and PyTorch's differ by a rounding
            np.testing.assert_array_max_ulp(*arrays, maxulp=1)
        else:
            np.testing.assert_array_equal(*arrays, err_msg=tensor)
    expected = scores(families.adapted(wanted, name), IDS)
    assert np.abs(scores(families.adapted(file, name), IDS) - expected).max() > 0.05
    np.testing.assert_allclose(scores(families.adapted(found, name), IDS), expected, atol=3e-6)


EXPERTS_IN_4_BITS = ("_blocks", "_scales")


def remove_tensors(path: Path, end: str) -> None:
    """Remove the tensors whose names end so."""
    from safetensors import torch as safetensors

    kept = {name: tensor for name, tensor in safetensors.load(path.read_bytes()).items() if not name.endswith(end)}
    safetensors.save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_hybrid_models_learn_as_beside_pytorch(family: tuple[str, Any, Path], precision: str, tmp_path: Path) -> None:
    """Losses of some steps with an adapter of PEFT on every mixer and MLP; in four bits, they come down."""
    pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
    name, network, file = family
    if name not in families.HYBRID:
        pytest.skip("tried with families that have other states than keys and values")
    if precision == "int4":
        assert families.verdict(name, file.parent.parent / "hf", tmp_path / "int4", "int4", "cpu") == ""
        return
    theirs = with_adapter(network, tmp_path / "theirs", target_modules=families.PEFT_TARGETS.get(name, "all-linear"))
    wanted, found = losses(theirs, surgery.load_adapter(file, tmp_path / "theirs"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[-1] < wanted[0]


def test_packed_rows_have_the_losses_of_rows_alone(family: tuple[str, Any, Path]) -> None:
    """Texts of 5 to 15 tokens, where a window is of 8."""
    name, _, file = family
    if name not in ("gemma2", "gemma3", "gpt-oss"):
        pytest.skip("tried with those that have windows, sinks and norms")
    rng, found = np.random.default_rng(3), []
    texts = [Tokens(rng.integers(3, families.WORDS, n), np.ones(n, bool)) for n in (5, 9, 12, 7, 4, 15)]
    for packed in (False, True):
        model = surgery.language_model(families.adapted(file, name), packed=packed)
        trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
        found.append(trainer.evaluate(ChatBatches(texts, 48, packed), batch_size=2)["loss"])
    np.testing.assert_allclose(found[1], found[0], rtol=5e-7)


# files with pages that are refused: the number of pages chooses the positions, or nodes of rows read packed tokens
NOT_PACKED = {
    "phi3 long": "a Shape reads it, too",
    "hunyuan": "a RotaryEmbedding of rows .* use_paged_attention for this family",
    "lfm2": "a Transpose of rows .* use_paged_attention for this family",
    "lfm2 moe": "a Transpose of rows .* use_paged_attention for this family",
}


def test_files_with_pages_are_those_without(family: tuple[str, Any, Path], tmp_path: Path) -> None:
    """Scores and losses of a file for engines that batch texts of several lengths, which only GPUs run."""
    name, _, file = family
    if name in families.WRITTEN_BY_OLDER:
        pytest.skip("the older builder writes no pages")
    source = file.parent.parent / "hf"
    try:
        paged = families.build(
            source,
            tmp_path / "paged",
            "fp16",
            "cuda",
            "use_paged_attention=1",
            "prune_lm_head=1",
            "paged_block_size=64",
        )
    except NotImplementedError as error:
        pytest.skip(f"the builder does not write it: {error}")
    if name in NOT_PACKED:
        with pytest.raises((BuildError, ModelError), match=NOT_PACKED[name]):
            scores(families.adapted(paged, name), IDS)
        return
    plain = families.build(source, tmp_path / "plain", "fp16", "cuda")
    wanted, found = (families.adapted(model, name) for model in (plain, paged))
    np.testing.assert_allclose(scores(found, IDS), scores(wanted, IDS), atol=families.CLOSE.get(name, 3e-6))
    both = [surgery.language_model(gg.lora(model, "*o_proj*", rank=2)) for model in (plain, paged)]
    steps = [gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(RATE)) for model in both]
    trainers = [gg.Trainer(step, device="cpu") for step in steps]
    history = [[float(own.step(surgery.next_tokens(IDS))["loss"]) for _ in range(STEPS)] for own in trainers]
    np.testing.assert_allclose(history[1], history[0], rtol=1e-5)


TOO_SMALL = ("phi2", "phi4 mini", "nemotron")  # turn a part of each head, and onnxruntime takes none of less than 8


def test_prompts_are_answered_with_a_cache_as_without(family: tuple[str, Any, Path]) -> None:
    """The likeliest tokens of prompts of several lengths, together and alone, and each by the whole text so far."""
    name, _, file = family
    if name in TOO_SMALL:
        pytest.skip("heads of this size are too small for onnxruntime's GroupQueryAttention")
    config = json.loads((file.parent / "genai_config.json").read_text())
    decoder = Decoder(file, head_size=config["model"]["decoder"]["head_size"])
    prompts, short = [IDS[0, :n].tolist() for n in (5, 2, 11, 5)], Sampling(max_tokens=10)
    alone = [decoder.generated([prompt], (), short)[0] for prompt in prompts]
    assert decoder.generated(prompts, (), short) == alone
    for prompt, tokens in zip(prompts, alone, strict=True):
        for i, token in enumerate(tokens):
            assert decoder.generated([prompt + tokens[:i]], (), Sampling(max_tokens=1)) == [[token]]


def test_the_table_of_the_page_has_every_family() -> None:
    assert named("families") == list(families.FAMILIES)


@pytest.mark.skipif(set(HERE) <= set(families.WRITTEN_BY_OLDER), reason="of the current builder")
@pytest.mark.parametrize("name", families.REFUSED)
def test_the_builder_writes_no_such_file(name: str, tmp_path: Path) -> None:
    """Once it does, the table and its notes have to say what becomes of the file."""
    families.write_network(name, tmp_path / "hf")
    with pytest.raises((AttributeError, KeyError, NotImplementedError), match=families.REFUSED[name]):
        families.build(tmp_path / "hf", tmp_path / "out", "fp32", "cpu")


BESIDE_EXPERTS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}  # fmt: skip


@pytest.mark.parametrize("part", BESIDE_EXPERTS)
@pytest.mark.parametrize("device", ["cpu", "webgpu"])
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_learn_with_experts_of_integers(bits: int, device: str, part: str, tmp_path: Path) -> None:
    """gpt-oss: PyTorch's losses, where its experts have the numbers of the file; all else is float32 in both."""
    pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
    network = families.write_network("gpt-oss", tmp_path / "hf")
    file = families.build(tmp_path / "hf", tmp_path / "out", "fp32", device, f"moe_quant_type=int{bits}")
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(file).graph.initializer}
    for i, layer in enumerate(network.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            key, weight = f"model.layers.{i}.moe.experts.{name}", getattr(layer.mlp.experts, name)
            was, weight.data = weight.data, numbers(stored[f"{key}.qweight"], stored[f"{key}.scales"], bits)
            assert 0 < (weight - was).abs().max() < (0.05 if bits == 4 else 0.002)
    np.testing.assert_allclose(scores(families.adapted(file, "gpt-oss"), IDS), of_torch(network, IDS), atol=3e-6)
    theirs = with_adapter(network, tmp_path / "adapter", **BESIDE_EXPERTS[part])
    model = surgery.load_adapter(file, tmp_path / "adapter")
    np.testing.assert_allclose(scores(model, IDS), of_torch(theirs, IDS), atol=3e-6)
    if part == "experts":
        merged, errors = tmp_path / "out" / "merged.onnx", dict[str, float]()
        surgery.merge_adapters(model, requantise=True, errors=errors, out=merged)
        assert {n.op_type for n in onnx.load(merged).graph.node} >= {"QMoE"} and len(errors) == 4
        close = of_torch(theirs, IDS)
        off = np.abs(scores(families.adapted(merged, "gpt-oss"), IDS) - close).max()
        assert off < (0.5 if bits == 4 else 0.05) * np.abs(close - of_torch(network, IDS)).max(), off
        prompt = [IDS[0, :5].tolist()]
        assert len(Decoder(merged, head_size=16).generated(prompt, (), Sampling(max_tokens=4))[0]) == 4
    wanted, found = losses(theirs, model)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert wanted[-1] < wanted[0]


@pytest.mark.parametrize("block", [0, 32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["gpt-oss", "lfm2 moe"])
def test_weights_of_another_training_become_the_integers_of_the_builder(
    name: str, bits: int, block: int, tmp_path: Path
) -> None:
    files, options = [], (f"moe_quant_type=int{bits}", f"qmoe_block_size={block}")
    for seed in (0, 1):
        network = families.write_network(name, tmp_path / f"hf{seed}", seed)
        files.append(families.build(tmp_path / f"hf{seed}", tmp_path / f"out{seed}", "fp32", "cpu", *options))
    for end in EXPERTS_IN_4_BITS:
        remove_tensors(tmp_path / "hf1" / "model.safetensors", end)
    errors, out = dict[str, float](), tmp_path / "out0" / "loaded.onnx"
    surgery.load_weights(files[0], tmp_path / "hf1", errors=errors, out=out)
    own, wanted = ({t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(f).graph.initializer}
                   for f in (out, files[1]))  # fmt: skip
    assert own.keys() == wanted.keys()
    for tensor, array in wanted.items():
        if not tensor.endswith(("qweight", "scales")):
            np.testing.assert_array_equal(own[tensor], array, err_msg=tensor)
    packed = [tensor for tensor in wanted if tensor.endswith("qweight")]
    assert len(packed) == len(errors) == (4 if name == "gpt-oss" else 2)
    for tensor in packed:  # MXFP4 may be on the grid of an old scale, and the builder rounds scales to float16
        assert (own[tensor] == wanted[tensor]).mean() > 0.99
    theirs = of_torch(network, IDS)
    found, rounding = (np.abs(scores(families.adapted(f, name), IDS) - theirs).max() for f in (out, files[1]))
    assert found < 1.1 * rounding


def numbers(packed: np.ndarray, scales: np.ndarray, bits: int) -> Any:
    """[experts, inputs, outputs] of QMoE's [experts, outputs, bytes], whose scales are each for 32 numbers."""
    each = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    weights = (each.astype(np.float32) - 2 ** (bits - 1)) * np.repeat(scales, 32, axis=-1)
    return torch.tensor(weights).mT.contiguous()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_in_the_order_of_cuda_are_refused(device: str, tmp_path: Path) -> None:
    """And as numbers lie elsewhere they train, with the option that the refusal names."""
    families.write_network("gpt-oss", tmp_path / "hf")
    source, precision = tmp_path / "hf", "int4"
    wanted = families.PACKED if device == "cuda" else ""
    assert families.verdict("gpt-oss", source, tmp_path / "out", precision, device) == wanted
    option = "qmoe_weights_prepacked=0"
    assert families.verdict("gpt-oss", source, tmp_path / "raw", precision, device, option) == ""


@pytest.mark.parametrize("precision", ["bf16", "int4"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "webgpu"])
@pytest.mark.parametrize("name", [name for name in HERE if name in ("qwen3", "gemma2", "gemma3")])
def test_a_cell_of_the_table_is_as_it_says(name: str, device: str, precision: str, tmp_path: Path) -> None:
    families.write_network(name, tmp_path / "hf")
    assert families.verdict(name, tmp_path / "hf", tmp_path / "out", precision, device) == ""


def test_a_folder_that_chats_have_tuned_answers(written: tuple[str, Any, Path], tmp_path: Path) -> None:
    """``finetune`` from the builder's folder; genai loads what it writes, and gives the answers that were taught."""
    folder = tmp_path / "llm"
    shutil.copytree(written[2], folder)
    (folder / "chat_template.jinja").write_text(
        "<s>{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[a]{% endif %}"
    )
    taught = {"One?": "first", "Two?": "second"}
    chats = [{"prompt": question, "completion": answer} for question, answer in taught.items()]
    target = ["*attn*", "*mlp*", "*lm_head*"]
    merge = "requantised" if written[0] == "int4" else "float"
    tuned = gg.finetune(
        folder, chats * 2, tmp_path / "tuned", target=target, rank=8, epochs=60, learning_rate=1e-2, held_out=0.0,
        merge=merge, progress=False,
    )  # fmt: skip
    assert tuned.figures["loss"] < 0.05
    switches = tmp_path / "switches"  # the base that the adapter is switched on in
    shutil.copytree(folder, switches, ignore=shutil.ignore_patterns("model.onnx*"))
    surgery.forget_sizes(
        surgery.switchable(gg.lora(folder / "model.onnx", target, rank=8)), out=switches / "model.onnx"
    )
    tokenizer = gg.chat.Encoder(folder).tokenizer
    for question, answer in taught.items():
        ((ids, _),) = tokenizer.spans([f"<s>[u]{question}[a]"], special=False)
        for place, adapter in ((tmp_path / "tuned", None), (switches, tmp_path / "tuned" / "adapter.onnx_adapter")):
            said = tokenizer.decode(of_genai(place, ids, len(answer) + 1, adapter))
            assert said in (answer, answer + "</s>")


def test_what_a_folder_says_of_drawing_does_not_count(written: tuple[str, Any, Path], tmp_path: Path) -> None:
    """It has ``top_k`` 50, as the builder writes it, and may have beams."""
    folder = tmp_path / "llm"
    shutil.copytree(written[2], folder)
    described = json.loads((folder / "genai_config.json").read_text())
    described["search"] |= {"top_k": 2, "top_p": 0.5, "num_beams": 3, "min_length": 40, "no_repeat_ngram_size": 2}
    (folder / "genai_config.json").write_text(json.dumps(described))
    by_genai, own = GenaiDecoder(folder), Decoder(folder / "model.onnx", head_size=16)
    if written[0] == "fp16":  # the builder declares wrong sizes
        with pytest.raises(
            ModelError, match=r"onnxruntime-genai failed .* with gradgraph.surgery.forget_sizes"
        ) as caught:
            by_genai.generated([TOKENS[:9]], (), Sampling(max_tokens=16))
        assert "length" not in str(caught.value)
        surgery.forget_sizes(folder / "model.onnx", out=tmp_path / "model.onnx")
        (tmp_path / "model.onnx").replace(folder / "model.onnx")
        by_genai = GenaiDecoder(folder)
    greedy = [each.generated([TOKENS[:9]], (), Sampling(max_tokens=16)) for each in (by_genai, own)]
    assert greedy[0] == greedy[1]
    drawn = {by_genai.generated([TOKENS[:9]], (), Sampling(1, temperature=2.0, seed=seed))[0][0] for seed in range(60)}
    assert len(drawn) > 15


def of_genai(folder: Path, ids: Sequence[int], count: int, adapter: Path | None = None) -> list[int]:
    """The likeliest tokens behind ``ids``, ``count`` at most, by onnxruntime-genai."""
    model = genai.Model(str(folder))
    options = genai.GeneratorParams(model)
    options.set_search_options(max_length=len(ids) + count, do_sample=False)
    generator, adapters = genai.Generator(model, options), genai.Adapters(model)
    if adapter is not None:
        adapters.load(str(adapter), "taught")
        generator.set_active_adapter(adapters, "taught")
    generator.append_tokens(np.array(ids, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0))[len(ids) :]
