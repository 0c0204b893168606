"""Language models of each family, as onnxruntime-genai's builder writes them, and the table of those that train.

``python -m tests.surgery.language_families --save`` writes the table of docs/reference/language-families.md, in the
environment of ``make shipped-models``: for every family, precision and kind of device it builds a file of random
weights, puts adapters in and trains three steps. That takes some minutes; the files go to a folder that is deleted.
Rows of families that only an older builder writes are made in the environment that has optimum.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe
from gradgraph.chat.adapted_layers import adapted_layers
from gradgraph.errors import ModelError
from gradgraph.files.models import load_model
from tests.surgery.family_tables import command

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4")
DEVICES = {"cpu": "CPU", "cuda": "CUDA", "webgpu": "WebGPU"}
WORDS = 98
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0, "tie_word_embeddings": False, "vocab_size": WORDS}  # fmt: skip
SLIDING = {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64, "rope_theta": 5e5}  # fmt: skip
LONG = {"rope_type": "longrope", "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "rope_theta": 1e4, "original_max_position_embeddings": 128}  # fmt: skip
MSCALE = {"short_mscale": 1.0, "long_mscale": 1.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID_OF_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "initializer_range": 0.2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                             "mrope_section": [4, 2, 2], "mrope_interleaved": True}}  # fmt: skip
VISION = {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4,
                            "out_hidden_size": 64, "num_position_embeddings": 16}}  # fmt: skip
GRANITE_4 = {"layer_types": ["attention", "attention"], "num_local_experts": 0, "shared_intermediate_size": 128,
             "position_embedding_type": "rope", "embedding_multiplier": 2.0, "attention_multiplier": 0.3,
             "residual_multiplier": 0.5, "logits_scaling": 2.0, "mamba_n_heads": 8, "mamba_d_state": 8,
             "mamba_d_head": 16, "mamba_chunk_size": 8}  # fmt: skip
# the model's class in transformers, its configuration's, and sizes of its own
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama 3": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": LLAMA_3, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"original_max_position_embeddings": 128}),
    "phi3 long": ("Phi3ForCausalLM", "Phi3Config", {"max_position_embeddings": 256, "rope_parameters": LONG,
                                                    "original_max_position_embeddings": 128}),
    "phi4 mini": ("Phi3ForCausalLM", "Phi3Config", {"original_max_position_embeddings": 128,
                                                    "partial_rotary_factor": 0.75, "tie_word_embeddings": True}),
    "phi2": ("PhiForCausalLM", "PhiConfig", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SLIDING | {"query_pre_attn_scalar": 16,
                                                               "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6,
                                                         "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {"embedding_multiplier": 2.0, "attention_multiplier": 0.3,
                                                        "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", {}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", {}),
    "ernie 4.5": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {"head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", {"head_dim": 16}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {"max_position_embeddings": 256, "num_local_experts": 4,
                                                     "rope_parameters": LONG | MSCALE}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", HYBRID_OF_CONVOLUTIONS),
    "lfm2 moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", HYBRID_OF_CONVOLUTIONS | EXPERTS | {"num_dense_layers": 1}),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config", {"text_config": SIZES | DELTA} | VISION),
    "qwen3.5 moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
                    {"text_config": SIZES | DELTA | EXPERTS | {"shared_expert_intermediate_size": 32}} | VISION),
    "granite 4": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", GRANITE_4),
    "granite 4 hybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig",
                         GRANITE_4 | {"layer_types": ["mamba", "attention"]}),
}  # fmt: skip
HYBRID = ("lfm2", "lfm2 moe", "qwen3.5", "qwen3.5 moe")  # have states other than keys and values
PEFT_FAMILY = {"phi3": "phi3", "phi3 long": "phi3", "phi4 mini": "phi3", "phi2": "phi", "lfm2": "lfm2",
               "lfm2 moe": "lfm2", "granite 4": "granitemoehybrid", "qwen3.5": "qwen3_5",
               "qwen3.5 moe": "qwen3_5"}  # of others: llama  # fmt: skip
# layers for PEFT's adapters, by a regular expression; others: "all-linear"
PEFT_TARGETS = {
    "lfm2 moe": r".*\.([qkv]_proj|out_proj|in_proj|w[123])",
    "qwen3.5": r".*language_model.*\.\w*(_proj|in_proj_\w+)",
    "qwen3.5 moe": r".*language_model.*_attn\.\w*(_proj|in_proj_\w+)",
}
# largest differences of scores, which are up to 6 with weights of usual size; smaller weights show that the builder
# normalises queries and keys without PyTorch's ε
CLOSE = {"qwen3.5": 5e-5, "qwen3.5 moe": 5e-5}  # others: 3e-6
# the builder's files compute something else than PyTorch here, in onnxruntime, too
NOT_AS_IN_TORCH = {"olmo", "nemotron", "phi2"}
NOT_WRITTEN, INCOMPLETE = "the builder does not write it", "the file lacks nodes or inputs, and onnxruntime refuses it"
PACKED = "packed for one kind of processor"
# what the current builder says of families that it does not write, or not for all processors
REFUSED = {"gemma3": "rope_type", "smollm3": "position_ids", "phimoe": "longrope", "granite 4 hybrid": "q_proj"}
OLDER, WRITTEN_BY_OLDER = "0.15.2", ("gemma3",)  # a builder that goes with transformers 4
MARKS = {"": "", NOT_WRITTEN: " ¹", INCOMPLETE: " ²", PACKED: " ⁴"}


def of_this_builder() -> list[str]:
    """Families whose rows are of the installed builder: an older one has those that the current one does not write."""
    older = version("onnxruntime-genai") == OLDER
    return [family for family in FAMILIES if (family in WRITTEN_BY_OLDER) == older]


def network(family: str, seed: int = 0) -> Any:
    """The module in PyTorch, of random weights that depend on the seed alone."""
    import torch
    import transformers

    from benchmarks import torchvision_operators

    torchvision_operators.declare()  # Gemma 3's module imports torchvision
    model, config, own = FAMILIES[family]
    torch.manual_seed(seed)
    settings = own if "text_config" in own else SIZES | own
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).float().eval()
    for parameter in made.parameters():
        if parameter.ndim == 1:  # norms of ones and biases of zeros would hide faults
            parameter.data += 0.1 * torch.randn_like(parameter)
    return made


def write_tokenizer(folder: Path) -> None:
    """The files of a tokenizer of one token for each printable character."""
    import transformers
    from tokenizers import Tokenizer, decoders, models

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(ord(" ") + i): 3 + i for i in range(95)}}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def experts_in_mxfp4(made: Any) -> dict[str, Any]:
    """The tensors of a published gpt-oss, whose experts then have these numbers: 4 bits each, and a scale for 32.

    Of them alone the builder makes experts of integers.
    """
    import torch

    numbers = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    numbers, stored = torch.cat([numbers, -numbers]), {}
    for i, layer in enumerate(made.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(layer.mlp.experts, name)  # [experts, inputs, outputs]
            experts, inputs, outputs = weight.shape
            codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
            exponents = torch.randint(119, 122, (experts, outputs, inputs // 32))
            values = numbers[codes] * 2.0 ** (exponents[..., None] - 127)
            weight.data = values.reshape(experts, outputs, inputs).mT.contiguous()
            key = f"model.layers.{i}.mlp.experts.{name}"
            stored[f"{key}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            stored[f"{key}_scales"] = exponents.to(torch.uint8)
    return stored


def write_network(family: str, folder: Path, seed: int = 0) -> Any:
    """The module, and its files with a tokenizer in ``folder``."""
    from safetensors import torch as safetensors

    made = network(family, seed)
    more = experts_in_mxfp4(made) if family == "gpt-oss" else {}
    made.save_pretrained(folder)
    weights = folder / "model.safetensors"
    safetensors.save_file(safetensors.load(weights.read_bytes()) | more, weights, metadata={"format": "pt"})
    config = folder / "config.json"  # the builder knows PhiMoE by the name of the published one
    config.write_text(config.read_text().replace("PhimoeForCausalLM", "PhiMoEForCausalLM"))
    write_tokenizer(folder)
    return made


def build(source: Path, out: Path, precision: str, device: str, *options: str) -> Path:
    """The file that the builder writes, with ``options`` such as ``moe_quant_type=int4``.

    Raises:
        Exception: of the builder, of any class.
    """
    words = ["builder", "-m", source, "-i", source, "-o", out, "-p", precision, "-e", device]
    words += ["--extra_options", *options] if options else []
    said = io.StringIO()
    quiet = (contextlib.redirect_stdout(said), contextlib.redirect_stderr(said))
    with mock.patch.object(sys, "argv", list(map(str, words))), quiet[0], quiet[1]:
        runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
    return out / "model.onnx"


def adapted(model: Path, family: str) -> Any:
    if family in HYBRID:
        return gg.lora(model, adapted_layers(load_model(model), Recipe()), rank=2)
    return gg.lora(model, "*attn*" if family == "gpt-oss" else ["*attn*", "*mlp*"], rank=2)


def verdict(family: str, source: Path, out: Path, precision: str, device: str, *options: str) -> str:
    """What became of a family: empty if its file trains."""
    try:
        file = build(source, out, precision, device, *options)
    except (Exception, SystemExit):  # of the builder
        return NOT_WRITTEN
    rows = np.random.default_rng(0).integers(3, WORDS, (2, 17))
    try:
        model = surgery.language_model(adapted(file, family))
        trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1), gg.optim.adam(1e-2)), device="cpu")
    except ModelError as error:
        if any(
            words in str(error) for words in ("is produced by no node", "which is not a graph input", "lacks the input")
        ):
            return INCOMPLETE
        if PACKED in str(error):
            return PACKED
        raise
    losses = [float(trainer.step(surgery.next_tokens(rows))["loss"]) for _ in range(3)]
    assert losses[2] < losses[0], (family, precision, device, losses)
    return ""


def row(family: str) -> list[str]:
    """Of the table."""
    cells = [family + (" ³" if family in NOT_AS_IN_TORCH else "") + (" ⁵" if family in WRITTEN_BY_OLDER else "")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_network(family, folder / "hf")
        for device in DEVICES:
            found = {p: verdict(family, folder / "hf", folder / f"{p}-{device}", p, device) for p in PRECISIONS}
            cells.append(", ".join(f"~~{p}~~{MARKS[v]}" if v else p for p, v in found.items()))
    return cells


def main() -> None:
    command("families", __doc__, ["family", *DEVICES.values()], FAMILIES, row, of_this_builder())


if __name__ == "__main__":
    main()
