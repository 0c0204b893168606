"""Decoders of each family, as optimum exports them, and the table of those that train.

``python -m tests.networks.optimum_decoders --save`` writes the table of docs/reference/language-families.md, in the
environment of ``make shipped-models`` with optimum: for every family it exports random weights with and without a past,
and holds scores, left padding, adapters of PEFT (both ways), losses, answers and loaded weights against PyTorch. That
takes minutes.
With a version of optimum before 2, files with a past hold two decoders; those rows are said, and are not to be saved.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import gradgraph as gg
from benchmarks import torchvision_operators
from gradgraph import surgery
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.model_folder import ModelFolder
from gradgraph.chat.sampling import Sampling
from tests.surgery.beside_torch import IDS, losses, of_torch, scores, with_adapter
from tests.surgery.family_tables import command
from tests.surgery.language_families import SIZES, WORDS, write_tokenizer

OLDER = version("optimum").startswith("1.") if find_spec("optimum") else False  # it merges two decoders in one file
TASKS = {"text-generation": "without a past", "text-generation-with-past": "with a past"}
TOKENS = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OF_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128} | TOKENS
OF_OPT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128} | TOKENS
# the name of the configuration in transformers, without its end, and sizes
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", OF_GPT2),
    "opt": ("OPT", OF_OPT | {"word_embed_proj_dim": 64, "ffn_dim": 128}),
    "gpt-neo": ("GPTNeo", TOKENS | {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 8,
                                    "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128}),
    "gpt-neox": ("GPTNeoX", OF_OPT | {"intermediate_size": 128}),
    "gpt-j": ("GPTJ", OF_GPT2 | {"rotary_dim": 8}),
    "falcon": ("Falcon", OF_OPT | {"alibi": False}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 32}),
    "phi": ("Phi", SIZES | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", SIZES | {"original_max_position_embeddings": 128}),
    "gemma": ("Gemma", SIZES | {"head_dim": 32}),
    "olmo": ("Olmo", SIZES),
    "granite": ("Granite", SIZES | {"embedding_multiplier": 2.0, "attention_multiplier": 0.3,
                                    "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "stablelm": ("StableLm", SIZES | {"partial_rotary_factor": 0.5}),
    "bloom": ("Bloom", TOKENS | {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mpt": ("Mpt", TOKENS | {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    "codegen": ("CodeGen", OF_GPT2 | {"rotary_dim": 8}),
}  # fmt: skip


def exported(family: str, folder: Path, task: str) -> tuple[Any, Path]:
    """The module in PyTorch, of random weights, and the folder that optimum writes of it."""
    import torch
    import transformers

    torchvision_operators.declare()
    from optimum.exporters.onnx import main_export

    config, sizes = FAMILIES[family]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{config}Config")(**sizes))
    network = made.float().eval()
    for parameter in network.parameters():
        if parameter.ndim == 1:  # norms of ones and biases of zeros would hide faults
            parameter.data += 0.1 * torch.randn_like(parameter)
    network.save_pretrained(folder / "theirs")
    write_tokenizer(folder / "theirs")
    portable = functools.partial(torch.onnx.export, dynamo=False)  # which older versions take for granted
    merged = {"legacy": True} if OLDER and task.endswith("past") else {}
    with mock.patch.object(torch.onnx, "export", portable):
        main_export(str(folder / "theirs"), folder / task, task=task, do_validation=False, **merged)
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx") if merged else ():
        (folder / task / name).unlink()  # those that decoder_model_merged.onnx holds
    return network, folder / task


def by_scores(network: Any, folder: Path) -> None:
    """Scores, and those of rows that are padded on the left."""
    adapted, wanted = gg.lora(ModelFolder.of(folder).decoder(), "*", rank=2), of_torch(network, IDS)
    np.testing.assert_allclose(scores(adapted, IDS), wanted, atol=3e-6)
    padded = np.pad(IDS, ((0, 0), (4, 0)), constant_values=9)
    mask = np.pad(np.ones_like(IDS), ((0, 0), (4, 0)))
    np.testing.assert_allclose(scores(adapted, padded, mask)[:, 4:], wanted, atol=3e-6)


def by_peft(network: Any, folder: Path) -> None:
    """Adapters of PEFT, loaded into the file, and saved for PEFT from there."""
    import peft

    theirs = with_adapter(network, folder / "theirs")
    wanted = of_torch(theirs, IDS)
    assert np.abs(wanted - of_torch(network, IDS)).max() > 0.05
    model = surgery.load_adapter(ModelFolder.of(folder).decoder(), folder / "theirs")
    np.testing.assert_allclose(scores(model, IDS), wanted, atol=3e-6)
    surgery.save_adapter(model, folder / "ours")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), folder / "ours").eval()
    np.testing.assert_allclose(of_torch(read, IDS), wanted, atol=3e-6)


def by_losses(network: Any, folder: Path) -> None:
    """Steps with an adapter of PEFT."""
    theirs = with_adapter(network, folder / "begun")
    wanted, found = losses(theirs, surgery.load_adapter(ModelFolder.of(folder).decoder(), folder / "begun"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert wanted[-1] < wanted[0]


def by_answers(network: Any, folder: Path) -> None:
    """The likeliest tokens behind prompts of several lengths, with the cache that the file has.

    PyTorch's are those of the whole text so far: its own ``generate`` gives others for CodeGen.
    """
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist()]
    found = Decoder(ModelFolder.of(folder).model).generated(prompts, (), Sampling(max_tokens=6))
    for prompt, tokens in zip(prompts, found, strict=True):
        likeliest = of_torch(network, np.array([[*prompt, *tokens]]))[0].argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


def by_weights(network: Any, folder: Path) -> None:
    """Scores with the weights of another training, which are loaded from a folder of transformers."""
    import torch

    other = copy.deepcopy(network)
    torch.manual_seed(1)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    other.save_pretrained(folder / "other")
    wanted = of_torch(other, IDS)
    assert np.abs(wanted - of_torch(network, IDS)).max() > 0.05
    decoder = ModelFolder.of(folder).decoder()  # PyTorch's older exporter does not name its matrices
    model = surgery.load_weights(decoder, folder / "other", exported_from=folder.parent / "theirs")
    near = 3e-6 * max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(scores(gg.lora(model, "*", rank=2), IDS), wanted, atol=near)


CHECKS: dict[str, Callable[[Any, Path], None]] = {
    "scores": by_scores, "PEFT": by_peft, "losses": by_losses, "answers": by_answers, "weights": by_weights,
}  # fmt: skip


def cell(family: str, task: str) -> str:
    """Parts of a family that work, and the first words of those that do not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            network, out = exported(family, Path(folder), task)
        except Exception as error:  # of optimum
            return f"optimum: {str(error).splitlines()[0][:80]}"
        told = []
        for name, check in CHECKS.items():
            try:
                check(network, out)
                told.append(name)
            except Exception as error:
                told.append(f"~~{name}~~ ({(str(error).strip() or 'they differ').splitlines()[0][:120]})")
        return ", ".join(told)


def row(family: str) -> list[str]:
    return [family, *(cell(family, task) for task in TASKS)]


def main() -> None:
    command("optimum", __doc__, ["family", *TASKS.values()], FAMILIES, row)


if __name__ == "__main__":
    main()
