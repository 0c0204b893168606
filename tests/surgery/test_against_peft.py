"""Beside Hugging Face's PEFT: from the same numbers, on the same data, losses are the same; files go both ways.

PEFT is in no extra, as it is large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy

import gradgraph as gg
from gradgraph import surgery
from tests.surgery import language_families as families
from tests.surgery.test_adapters import IMAGES, made, node

peft = pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")
torch = pytest.importorskip("torch", reason="PEFT adapts modules of PyTorch")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, RATE = 12, 0.02


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.first(x)))

    nodes = (node("Gemm", ["x", "first.weight", "first.bias"], ["h"], transB=1), node("Relu", ["h"], ["r"]),
             node("Gemm", ["r", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape: tuple[Any, ...] = ("rows", 8)
    targets = ("first", "last")


class Images(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4 * 36, 5)

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.conv(x)).flatten(1))

    nodes = (node("Conv", ["x", "conv.weight", "conv.bias"], ["h"], pads=[1] * 4), node("Relu", ["h"], ["r"]),
             node("Flatten", ["r"], ["f"]),
             node("Gemm", ["f", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape = tuple(IMAGES)
    targets = ("conv", "last")


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(7, 8), torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        return self.last(self.words(x))

    nodes = (node("Gather", ["words.weight", "x"], ["h"]),
             node("Gemm", ["h", "last.weight", "last.bias"], ["y"], transB=1))  # fmt: skip
    shape = ("rows",)
    targets = ("words", "last")


LORA = {"r": 4, "lora_alpha": 6}
CASES: dict[str, tuple[type, Any]] = {
    "lora": (Dense, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
    "rslora": (Dense, lambda m: peft.LoraConfig(**LORA, use_rslora=True, target_modules=m)),
    "dora": (Dense, lambda m: peft.LoraConfig(**LORA, use_dora=True, target_modules=m)),
    "ia3": (Dense, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=[])),
    "ia3 with a feed-forward layer": (Dense, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=["last"])),
    "lora with ranks of their own": (
        Dense, lambda m: peft.LoraConfig(**LORA, target_modules=m, rank_pattern={"last": 2}, alpha_pattern={"last": 3}),
    ),
    "lora of a Conv": (Images, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
    "dora of a Conv": (Images, lambda m: peft.LoraConfig(**LORA, use_dora=True, target_modules=m)),
    "ia3 of a Conv": (Images, lambda m: peft.IA3Config(target_modules=m, feedforward_modules=[])),
    "lora of an embedding": (Words, lambda m: peft.LoraConfig(**LORA, target_modules=m)),
}  # fmt: skip


def as_onnx(network: Any) -> onnx.ModelProto:
    numbers = {n: p.detach().numpy() for n, p in network.named_parameters()}
    kind = onnx.TensorProto.INT64 if isinstance(network, Words) else onnx.TensorProto.FLOAT
    return made(list(network.nodes), numbers, list(network.shape), kind)


def trained_together(
    trainer: gg.Trainer, theirs: Any, optimizer: Any, x: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Losses of so many steps on one batch: ours, and PEFT's."""
    own, other = [], []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(theirs(torch.tensor(x)), torch.tensor(target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        own.append(float(trainer.step({"x": x, "target": target})["loss"]))
        other.append(float(loss.detach()))
    return np.array(own), np.array(other)


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_same_and_files_are_read(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    kind, config = CASES[name]
    network = kind()
    base = as_onnx(network)
    rows = [8, *kind.shape[1:]]
    x = rng.integers(0, 7, 8) if kind is Words else rng.normal(size=rows).astype(np.float32)
    target = rng.normal(size=(8, 5)).astype(np.float32)
    theirs = peft.get_peft_model(copy.deepcopy(network), config(list(kind.targets)))
    theirs.save_pretrained(tmp_path / "begun")
    model = surgery.load_adapter(base, tmp_path / "begun")
    step = gg.build(model, "mse", gg.optim.adam(RATE))
    trainer = gg.Trainer(step, device="cpu")
    optimizer = torch.optim.Adam([p for p in theirs.parameters() if p.requires_grad], RATE)
    assert sum(p.numel() for p in theirs.parameters() if p.requires_grad) == sum(
        int(np.prod(s.shape)) for s in step.manifest.state if s.kind == "parameter"
    )
    own, other = trained_together(trainer, theirs, optimizer, x, target)
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    assert own[-1] < 0.95 * own[0]
    surgery.save_adapter(model, tmp_path / "trained", trainer.state_dict())
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "trained").eval()
    np.testing.assert_allclose(read(torch.tensor(x)).detach().numpy(), trainer.predict(x), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    merged = surgery.merge_adapters(surgery.load_adapter(base, tmp_path / "theirs"))
    found = gg.Trainer(gg.build(merged, "mse"), device="cpu").predict(x)
    np.testing.assert_allclose(found, theirs.eval()(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


# --- every field of LoraConfig ----------------------------------------------------------------------------------


class Blocks(torch.nn.Module):
    """Layers with the names that PEFT treats by themselves, a Conv1D, and two numbered ones."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.embed_tokens = torch.nn.Embedding(7, 8)
        numbered = torch.nn.ModuleList(torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 8)}) for _ in range(2))
        self.h = torch.nn.ModuleDict({"layers": numbered})
        self.c_fc, self.lm_head = Conv1D(8, 8), torch.nn.Linear(8, 7, bias=False)

    def forward(self, x: Any) -> Any:
        h = self.embed_tokens(x)
        for layer in self.h["layers"]:
            h = torch.tanh(layer["fc"](h))
        return self.lm_head(torch.tanh(self.c_fc(h)))

    def get_input_embeddings(self) -> Any:
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head


BLOCKS = (node("Gather", ["embed_tokens.weight", "x"], ["e"]),
          node("Gemm", ["e", "h.layers.0.fc.weight", "h.layers.0.fc.bias"], ["a"], transB=1),
          node("Tanh", ["a"], ["b"]),
          node("Gemm", ["b", "h.layers.1.fc.weight", "h.layers.1.fc.bias"], ["c"], transB=1),
          node("Tanh", ["c"], ["d"]),
          node("Gemm", ["d", "c_fc.weight", "c_fc.bias"], ["f"]), node("Tanh", ["f"], ["g"]),
          node("Gemm", ["g", "lm_head.weight"], ["y"], transB=1))  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "r": [1, 3], "lora_alpha": [1, 5], "lora_dropout": [0.5], "use_rslora": [True], "use_dora": [True],
    "target_modules": [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "fc"], r".*\.fc", "all-linear"],
    "exclude_modules": [["h.layers.1.fc"]], "layers_to_transform": [1, [0]], "layers_pattern": ["layers"],
    "rank_pattern": [{"h.layers.1.fc": 2}, {r"h\.layers\.0\..*": 3}], "alpha_pattern": [{"fc": 3}],
    "modules_to_save": [["lm_head"], ["head"], ["c_fc"], ["h.layers.1.fc"], ["embed_tokens"]],
    "fan_in_fan_out": [True], "bias": ["all", "lora_only"], "lora_bias": [True], "revision": ["main"],
    "init_lora_weights": [True, False, "gaussian", "orthogonal", "eva", "olora", "pissa", "pissa_niter_4", "mica"],
    "trainable_token_indices": [{"embed_tokens": [1, 2]}], "layer_replication": [[[0, 2], [0, 2]]],
    "target_parameters": [["h.layers.0.fc.weight"]], "ensure_weight_tying": [True], "base_model_name_or_path": ["none"],
    "use_qalora": [True], "qalora_group_size": [4], "megatron_core": ["megatron.core"], "inference_mode": [True],
    "alora_invocation_tokens": [[1, 2]],
}  # fmt: skip
OF_PACKAGES = frozenset(  # set by PEFT, or of another package, or of data
    {"arrow_config", "auto_mapping", "corda_config", "eva_config", "kasa_config", "loftq_config", "lora_ga_config"}
    | {"megatron_config", "monteclora_config", "peft_type", "peft_version", "runtime_config", "task_type"}
    | {"use_bdlora", "velora_config"}
)
SET = [(name, value) for name, values in FIELDS.items() for value in values]


def test_every_field_is_tried() -> None:
    assert {f.name for f in dataclasses.fields(peft.LoraConfig)} == FIELDS.keys() | OF_PACKAGES


@pytest.mark.parametrize(("name", "value"), SET, ids=[f"{name}={value}" for name, value in SET])
def test_a_field_is_read_or_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Blocks().eval()
    target = ["c_fc"] if name in ("fan_in_fan_out", "target_parameters") else ["fc"]
    options = {**LORA, "target_modules": target, name: value}
    if name == "modules_to_save":
        options["target_modules"] = ["h.layers.0.fc"]
    if name == "layers_pattern":
        options["layers_to_transform"] = [0]
    try:
        theirs = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(**options))
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * (parameter.std() or 1) * torch.randn_like(parameter)
        theirs.save_pretrained(tmp_path)
        read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path).eval()
    except (ValueError, ImportError, AttributeError, TypeError, NotImplementedError, RuntimeError, KeyError) as error:
        pytest.skip(f"PEFT does not take it here: {error}")
    numbers = {n: p.detach().numpy() for n, p in network.named_parameters()}
    base = made(list(BLOCKS), numbers, ["rows"], onnx.TensorProto.INT64)
    x = np.arange(7)
    wanted = read(torch.tensor(x)).detach().numpy()
    try:
        model = surgery.load_adapter(base, tmp_path)
    except gg.errors.DataError as error:
        assert name in str(error) or (name == "modules_to_save" and "fan_in_fan_out" in str(error)), error
        return
    found = gg.Trainer(gg.build(model, "mse"), device="cpu").predict(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


ENDS = ("q_proj", "v_proj", "fc", "head", "self_attn.q_proj", "layers.1.fc", "embed", "model.head", r"q\_proj")
NAMES = [*(f"{root}{layers}.{i}.{end}" for root in ("", "model.", "model.text.") for layers in ("layers", "h")
           for i in (0, 1, 10) for end in ("self_attn.q_proj", "self_attn.v_proj", "fc", "experts.1.fc")),
         "head", "model.head", "model.embed", "overhead", "fc", "model.head.fc"]  # fmt: skip
EXPRESSIONS = (r".*\.(q|v)_proj", "fc", r"model\.layers\.[01]\..*", r".*q_proj|.*\.head", "model.head")


def drawn_settings(rng: np.random.Generator) -> dict[str, Any]:
    def some() -> list[str]:
        return [str(name) for name in rng.choice(ENDS, int(rng.integers(1, 4)), replace=False)]

    settings: dict[str, Any] = {"target_modules": some() if rng.random() < 0.7 else str(rng.choice(EXPRESSIONS))}
    if rng.random() < 0.3:
        settings["exclude_modules"] = some() if rng.random() < 0.7 else str(rng.choice(EXPRESSIONS))
    if rng.random() < 0.3:
        settings["modules_to_save"] = [str(name) for name in rng.choice(["head", "embed", "model.head", "fc"], 1)]
    if isinstance(settings["target_modules"], list) and rng.random() < 0.5:
        settings["layers_to_transform"] = [1, [0, 10], [], [7], 0][int(rng.integers(5))]
        if settings["layers_to_transform"] != [] and rng.random() < 0.5:
            settings["layers_pattern"] = ["h", ["layers", "h"], ["text"], []][int(rng.integers(4))]
    return settings


def test_tensors_that_peft_would_ignore_are_those_of_modules_left_out() -> None:
    """By PEFT's own function, for random settings."""
    from peft.tuners.tuners_utils import check_target_module_exists

    from gradgraph.files.untrusted.documents import Fields
    from gradgraph.surgery.peft_settings import left_out_by

    rng, seen = np.random.default_rng(0), set[str | None]()
    for _ in range(300):
        settings = drawn_settings(rng)
        config = peft.LoraConfig(**settings)
        for name in NAMES:
            field = left_out_by(Fields(settings, "it"), name)
            assert (field is None) == bool(check_target_module_exists(config, name)), (settings, name, field)
            seen.add(field)
    assert seen == {None, "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"}


RATIO, DECAY = 16, 0.1


@pytest.mark.parametrize("kind", ["lora", "dora", "lora of an embedding"])
def test_lora_plus_is_its_optimizer(kind: str, tmp_path: Path) -> None:
    """``peft.optimizers.create_loraplus_optimizer`` is AdamW in groups, as ours is: its numbers, step by step."""
    from peft.optimizers import create_loraplus_optimizer

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    made_of, config = CASES[kind]
    network = made_of()
    x = rng.integers(0, 7, 8) if made_of is Words else rng.normal(size=(8, 8)).astype(np.float32)
    target = rng.normal(size=(8, 5)).astype(np.float32)
    theirs = peft.get_peft_model(copy.deepcopy(network), config(list(network.targets)))
    theirs.save_pretrained(tmp_path / "begun")
    options = {"lr": 1e-3, "weight_decay": DECAY, "loraplus_weight_decay": DECAY, "loraplus_lr_embedding": 2e-3}
    optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, loraplus_lr_ratio=RATIO, **options)
    groups = {"*.lora_B": {"lr_factor": RATIO}}
    if kind == "dora":
        groups["*.lora_magnitude_vector"] = {"lr_factor": RATIO}  # one axis: PEFT counts it to the second factors
    if made_of is Words:
        groups = {"words.lora_*": {"lr_factor": 2}, "last.lora_B": {"lr_factor": RATIO}}
    model = surgery.load_adapter(as_onnx(network), tmp_path / "begun")
    step = gg.build(model, "mse", gg.optim.adamw(1e-3, weight_decay=DECAY, groups=groups))
    trainer = gg.Trainer(step, device="cpu")
    own, other = trained_together(trainer, theirs, optimizer, x, target)
    np.testing.assert_allclose(own, other, rtol=1e-4)
    assert own[-1] < 0.97 * own[0]
    surgery.save_adapter(model, tmp_path / "trained", trainer.state_dict())
    theirs.save_pretrained(tmp_path / "theirs")
    found, wanted = (
        safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("trained", "theirs")
    )
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4 * np.abs(array).max(), err_msg=name)


def test_a_conv_in_groups_is_read_by_peft(tmp_path: Path) -> None:
    """PEFT's first factor has no groups: ours is stored with zeros where a group does not look."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3, groups=2, bias=False))
    base = made([node("Conv", ["x", "0.weight"], ["y"], group=2)], {"0.weight": network[0].weight.detach().numpy()},
                ["rows", 4, 6, 6], y=["rows", 6, 4, 4])  # fmt: skip
    model = gg.lora(base, "0", rank=4, alpha=6)
    rng = np.random.default_rng(0)
    numbers = {
        t.name: rng.normal(size=list(t.dims)).astype(np.float32) for t in model.graph.initializer if "lora" in t.name
    }
    surgery.save_adapter(model, tmp_path, numbers)
    x = rng.normal(size=(2, 4, 6, 6)).astype(np.float32)
    read = peft.PeftModel.from_pretrained(network, tmp_path).eval()
    filled = surgery.load_weights(model, numbers, strict=False)
    found = gg.Trainer(gg.build(filled, "mse"), device="cpu").predict(x)
    np.testing.assert_allclose(found, read(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-4)
    again = surgery.load_adapter(base, tmp_path)
    np.testing.assert_array_equal(
        *({t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer}["0.lora_A"] for m in (filled, again))
    )


# --- prefixes ---------------------------------------------------------------------------------------------------

LENGTH, TOKENS, LETTERS = 3, 7, 50


class Scores(torch.nn.Module):
    """A network of transformers with positions as an input, as its exports have them."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Any, position_ids: Any) -> Any:
        return self.network(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0)
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=LETTERS, n_positions=64, bos_token_id=1, eos_token_id=2,
                   **none)
    )  # fmt: skip


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=LETTERS, bos_token_id=1,
                    eos_token_id=2, pad_token_id=0)
    )  # fmt: skip


def by_torch(network: Any, tokens: np.ndarray, _: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """As PyTorch exports it: attention written out."""
    feeds = {"input_ids": tokens, "position_ids": np.tile(np.arange(TOKENS), (len(tokens), 1))}
    axes = {name: {0: "batch", 1: "time"} for name in feeds}
    return gg.frontend.from_torch(Scores(network), tuple(map(torch.tensor, feeds.values())), dynamic=axes), feeds


def by_genai(network: Any, tokens: np.ndarray, folder: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """As onnxruntime-genai's builder writes it: GroupQueryAttention, which counts positions itself."""
    pytest.importorskip("onnxruntime_genai", reason="in no extra; `make shipped-models` runs these tests with it")
    network.save_pretrained(folder / "hf")
    families.write_tokenizer(folder / "hf")
    return surgery.language_model(families.build(folder / "hf", folder / "out", "fp32", "cpu")), {"input_ids": tokens}


PREFIXED = {"GPT-2 of PyTorch": (gpt2, by_torch), "Llama of PyTorch": (llama, by_torch),
            "Llama of genai's builder": (llama, by_genai)}  # fmt: skip


@pytest.mark.parametrize("name", PREFIXED)
def test_a_prefix_is_that_of_peft(name: str, tmp_path: Path) -> None:
    make, exported = PREFIXED[name]
    torch.manual_seed(0)
    network = make().eval()
    tokens, target = np.random.default_rng(0).integers(3, LETTERS, (2, 2, TOKENS))
    base, feeds = exported(network, tokens, tmp_path)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=LENGTH)
    theirs = peft.get_peft_model(copy.deepcopy(network), config)
    theirs.save_pretrained(tmp_path / "begun")
    model = surgery.load_adapter(base, tmp_path / "begun")
    step = gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.sgd(1.0))
    trainer = gg.Trainer(step, device="cpu")

    def scores(of: Any) -> Any:
        return of(input_ids=torch.tensor(tokens)).logits

    np.testing.assert_allclose(trainer.predict(feeds), scores(theirs).detach().numpy(), rtol=1e-4, atol=1e-5)
    table = next(p for p in theirs.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD([table], 1.0)
    assert table.numel() == sum(int(np.prod(s.shape)) for s in step.manifest.state if s.kind == "parameter")
    before = table.detach().clone()
    for count in range(4):
        loss = torch.nn.functional.cross_entropy(scores(theirs).flatten(0, 1), torch.tensor(target).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = float(trainer.step({**feeds, "target": target})["loss"])
        np.testing.assert_allclose(found, float(loss.detach()), rtol=1e-4)
        if count in (0, 3):  # the rate is 1: what has changed after the first step is the gradient
            surgery.save_adapter(model, tmp_path / "trained", trainer.state_dict())
            stored = safetensors.numpy.load_file(tmp_path / "trained" / "adapter_model.safetensors")
            moved, wanted = stored["prompt_embeddings"] - before.numpy(), (table - before).detach().numpy()
            np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), tmp_path / "trained").eval()
    np.testing.assert_allclose(scores(read).detach().numpy(), trainer.predict(feeds), rtol=1e-4, atol=1e-5)
    merged = surgery.merge_adapters(model, trainer.state_dict())
    found = gg.Trainer(gg.build(merged, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(feeds)
    np.testing.assert_allclose(found, trainer.predict(feeds), rtol=1e-5, atol=1e-6)


def test_a_prefix_that_was_projected_is_read(tmp_path: Path) -> None:
    """PEFT stores what the projection gives; this goes on without one."""
    torch.manual_seed(0)
    network = gpt2().eval()
    tokens = np.random.default_rng(0).integers(3, LETTERS, (2, TOKENS))
    base, feeds = by_torch(network, tokens, tmp_path)
    sizes = {"num_virtual_tokens": LENGTH, "prefix_projection": True, "encoder_hidden_size": 8}
    theirs = peft.get_peft_model(network, peft.PrefixTuningConfig(task_type="CAUSAL_LM", **sizes)).eval()
    theirs.save_pretrained(tmp_path)
    model = surgery.load_adapter(base, tmp_path)
    found = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu").predict(feeds)
    wanted = theirs(input_ids=torch.tensor(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
