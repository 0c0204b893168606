"""Language models that torch.onnx.export writes from transformers' modules, and the table of those that train.

``python -m tests.networks.exported_decoders --save`` writes the table of docs/reference/language-families.md, in the
environment of ``make shipped-models``: decoders with random weights, from tokens to logits, without a cache; and
encoder-decoders, from both inputs to the decoder's logits. Logits, PEFT adapters (both ways), losses and answers are
compared with PyTorch. That takes minutes.
"""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph import surgery
from gradgraph.chat import Recipe
from gradgraph.chat.adapted_layers import adapted_layers
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.sampling import Sampling
from gradgraph.files.models import load_model
from gradgraph.surgery.language_models import fixed_length
from gradgraph.surgery.layer_kinds import layers_and_kinds, other_layers
from gradgraph.surgery.linear_layers import linear_layers
from tests.surgery.beside_torch import IDS, RATE, STEPS, with_adapter
from tests.surgery.family_tables import command
from tests.surgery.language_families import DELTA, EXPERTS, GRANITE_4, HYBRID_OF_CONVOLUTIONS, SIZES, WORDS

MAMBA = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "bos_token_id",
                                        "eos_token_id", "pad_token_id")}  # fmt: skip
MAMBA |= {"state_size": 8, "tie_word_embeddings": False}
MAMBA_2 = MAMBA | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}
NEMOTRON_H = {"layers_block_type": ["mamba", "mlp", "attention", "mlp"], "head_dim": 16, "ssm_state_size": 8,
              "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8}  # fmt: skip
FALCON_H1 = {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
             "mamba_n_groups": 1, "mamba_chunk_size": 8}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
          "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32}  # fmt: skip
USUAL = {"initializer_range": 0.02}  # larger weights amplify rounding
# decoders: the name of the configuration in transformers, without its end, and sizes
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2", SIZES | HYBRID_OF_CONVOLUTIONS),
    "mamba": ("Mamba", MAMBA),
    "mamba 2": ("Mamba2", MAMBA_2),
    "qwen3-next": ("Qwen3Next", SIZES | DELTA | USUAL | EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3.5": ("Qwen3_5Text", SIZES | DELTA | USUAL),
    "granite 4 hybrid": ("GraniteMoeHybrid", SIZES | GRANITE_4 | {"layer_types": ["mamba", "attention"]}),
    "nemotron-h": ("NemotronH", SIZES | NEMOTRON_H),
    "falcon-h1": ("FalconH1", SIZES | FALCON_H1),
    "granite moe": ("GraniteMoe", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek v3": ("DeepseekV3", SIZES | LATENT),
    "qwen3 moe": ("Qwen3Moe", SIZES | EXPERTS | {"head_dim": 16}),
}
SMALL = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
         "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "vocab_size": WORDS, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
# encoder-decoders, likewise
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4,
                  "decoder_start_token_id": 0}),
    "bart": ("Bart", SMALL | {"max_position_embeddings": 64}),
    "whisper": ("Whisper", SMALL | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64}),
}  # fmt: skip
FAMILIES = DECODERS | PAIRS
# layers without adapters, and types of models: PEFT refuses out_proj, and a module reads the weight of dt_proj itself
NOT_FOR_PEFT = {"out_proj": ("falcon_h1", "mamba", "mamba2", "nemotron_h"), "dt_proj": ("mamba",)}
FIXED = "¹"  # marks families whose number of tokens the exporter fixes
WRAPPER = "network."  # of all layers in the files: the exported module returns the logits of ``network``


@dataclass(frozen=True)
class Exported:
    """A module in PyTorch, with random weights, and its exported file."""

    network: Any
    file: Path
    batch: dict[str, np.ndarray]

    @property
    def linear(self) -> list[str]:
        """The names of the linear layers that adapters are put on, other than the head."""
        head, kind = self.network.get_output_embeddings(), self.network.config.model_type
        refused = {last for last, kinds in NOT_FOR_PEFT.items() if kind in kinds}
        return [name for name, module in self.network.named_modules()
                if type(module).__name__ == "Linear" and module is not head
                and name.rpartition(".")[2] not in refused]  # fmt: skip

    def with_adapter(self, name: str) -> tuple[Any, Any]:
        """The module with a PEFT adapter, and the file with the same adapter, from the folder ``name``."""
        theirs = with_adapter(self.network, self.file.parent / name, target_modules=self.linear)
        return theirs, surgery.load_adapter(self.file, self.file.parent / name)

    def trainer(self, model: Any, *optimizer: Any) -> gg.Trainer:
        return gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1), *optimizer), device="cpu")


def batch_of(network: Any, length: int = IDS.shape[1]) -> dict[str, np.ndarray]:
    """Inputs of a module: tokens, or a spectrogram for Whisper; and the decoder's tokens."""
    rng, ids = np.random.default_rng(3), IDS[:, :length]
    if network.main_input_name == "input_features":
        return {"input_features": rng.normal(size=(2, 8, 24)).astype(np.float32), "decoder_input_ids": ids}
    if network.config.is_encoder_decoder:
        return {"input_ids": rng.integers(3, WORDS, (2, 9)), "decoder_input_ids": ids}
    return {"input_ids": ids}


def of_torch(network: Any, batch: dict[str, np.ndarray]) -> Any:
    import torch

    return network(**{name: torch.tensor(values) for name, values in batch.items()}, use_cache=False).logits


def module(family: str) -> Any:
    import torch
    import transformers

    config, sizes = FAMILIES[family]
    made = transformers.AutoModelForCausalLM.from_config
    if family in PAIRS:
        made = getattr(transformers, f"{config}ForConditionalGeneration")._from_config
    torch.manual_seed(0)
    network = made(getattr(transformers, f"{config}Config")(**sizes), attn_implementation="eager").float().eval()
    if getattr(network.config, "_experts_implementation", None) is not None:
        network.set_experts_implementation("batched_mm")  # others loop over the experts that tokens are sent to
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1 or name.endswith("A_log"):  # norms of ones, biases of zeros, equal layers hide faults
            parameter.data += 0.1 * torch.randn_like(parameter)
    return network


def exported(family: str, folder: Path) -> Exported:
    import torch

    network = module(family)
    batch = batch_of(network)

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, first: Any, second: Any = None) -> Any:
            return network_scores(self.network, dict(zip(batch, (first, second), strict=False)))

    rows = torch.export.Dim("batch")
    sizes = [{0: rows} if x.ndim > 2 else {0: rows, 1: torch.export.Dim(f"{name}_length", min=2)}
             for name, x in batch.items()]  # fmt: skip
    file = folder / "model.onnx"
    with torch.no_grad():
        torch.onnx.export(
            Scores().eval(), tuple(map(torch.tensor, batch.values())), file, dynamo=True, verbose=False,
            dynamic_shapes=dict(zip(("first", "second"), sizes, strict=False)), input_names=list(batch),
            output_names=["logits"],
        )  # fmt: skip
    return Exported(network, file, batch)


def network_scores(network: Any, values: dict[str, Any]) -> Any:
    return network(**values, use_cache=False).logits


# --- what is compared ----------------------------------------------------------------------------------------------


def same(found: Any, wanted: Any) -> None:
    """Logits agree to 3e-6, or to this part of the largest."""
    wanted = np.asarray(wanted.detach())
    np.testing.assert_allclose(found, wanted, atol=3e-6 * max(1.0, float(np.abs(wanted).max())))


def by_scores(one: Exported) -> None:
    """Logits of texts of several lengths, of a file with adapters that are zero."""
    trainer = one.trainer(gg.lora(one.file, "*", rank=2))
    for length in (IDS.shape[1],) if fixed_length(load_model(one.file)) else (IDS.shape[1], 9):
        batch = batch_of(one.network, length)
        same(trainer.predict(batch), of_torch(one.network, batch))


def by_peft(one: Exported) -> None:
    """PEFT adapters, loaded into the file; and saved from there, read by PEFT."""
    import peft

    theirs, model = one.with_adapter("theirs")
    wanted = of_torch(theirs, one.batch).detach()
    assert np.abs(wanted - of_torch(one.network, one.batch).detach()).max() > 0.01
    same(one.trainer(model).predict(one.batch), wanted)
    surgery.save_adapter(model, one.file.parent / "ours", names={f"{WRAPPER}*": "*"})
    read = peft.PeftModel.from_pretrained(copy.deepcopy(one.network), one.file.parent / "ours").eval()
    same(of_torch(read, one.batch).detach(), wanted)


def by_losses(one: Exported) -> None:
    """Steps of AdamW with a PEFT adapter, on the next tokens."""
    import torch

    theirs, model = one.with_adapter("begun")
    trainer = one.trainer(model, gg.optim.adamw(RATE, weight_decay=0.0))
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], RATE, weight_decay=0.0)
    labels = np.roll(IDS, -1, 1)
    wanted, found = [], []
    for _ in range(STEPS):
        logits = of_torch(theirs, one.batch).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
        found.append(float(trainer.step({**one.batch, "target": labels})["loss"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[-1] < wanted[0]


def by_answers(one: Exported) -> None:
    """The likeliest tokens after prompts of several lengths."""
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist()]
    found = Decoder(one.file).generated(prompts, (), Sampling(max_tokens=6))
    for prompt, tokens in zip(prompts, found, strict=True):
        likeliest = of_torch(one.network, {"input_ids": np.array([[*prompt, *tokens]])})[0].argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


def by_weights(one: Exported) -> None:
    """Logits with the weights of another training, from a folder of transformers, beside that of the export."""
    import torch

    other, folder = copy.deepcopy(one.network), one.file.parent
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    one.network.save_pretrained(folder / "own")
    other.save_pretrained(folder / "other")
    wanted = of_torch(other, one.batch).detach()
    assert np.abs(wanted - of_torch(one.network, one.batch).detach()).max() > 0.01
    model = surgery.load_weights(one.file, folder / "other", exported_from=folder / "own")
    same(one.trainer(gg.lora(model, "*", rank=2)).predict(one.batch), wanted)


CHECKS: dict[str, Callable[[Exported], None]] = {
    "scores": by_scores, "PEFT": by_peft, "losses": by_losses, "answers": by_answers, "weights": by_weights,
}  # fmt: skip


# --- the table -----------------------------------------------------------------------------------------------------


def compared(family: str, one: Exported) -> str:
    """What agrees with PyTorch, and the first words of the errors of what does not."""
    told = []
    for name, check in CHECKS.items():
        if check is by_answers and family in PAIRS:
            continue
        try:
            check(one)
            told.append(name)
        except Exception as error:
            told.append(f"~~{name}~~ ({(str(error).strip() or 'they differ').splitlines()[0][:120]})")
    return ", ".join(told)


def layers(file: Path) -> tuple[str, str]:
    """How many layers have adapters by default, and how many have none, by kind."""
    model = load_model(file)
    every, kinds = layers_and_kinds(model)
    chosen = {layer.node for layer in linear_layers(model, adapted_layers(model, Recipe()))[0]}
    adapted = Counter(kinds[layer.node] for layer in every if layer.node in chosen)
    others = Counter(kinds[layer.node] for layer in every if layer.node not in chosen) + other_layers(model)
    return _counted(adapted), _counted(others)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def row(family: str) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        try:
            one = exported(family, Path(name))
        except Exception as error:  # of the exporter
            return [family, "", "", f"torch.onnx.export: {str(error).splitlines()[0][:80]}"]
        mark = f" {FIXED}" if fixed_length(load_model(one.file)) else ""
        return [f"{family}{mark}", *layers(one.file), compared(family, one)]


def main() -> None:
    command(
        "exported", __doc__, ["family", "layers with adapters", "layers without", "agree with PyTorch"], FAMILIES, row
    )


if __name__ == "__main__":
    main()
