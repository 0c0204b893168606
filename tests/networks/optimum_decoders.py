"""Decoders of each family, as optimum exports them, and the table of those that train.

``python -m tests.networks.optimum_decoders --save`` writes the table of docs/how-to/language-models.md, in the
environment of ``make shipped-models`` with optimum: for every family it exports random weights with and without a past,
and holds scores, left padding, adapters of PEFT (both ways) and answers against PyTorch. That takes some minutes.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from surgery.language_families import PAGE, SIZES, WORDS, write_tokenizer

import gradgraph as gg
from benchmarks import torchvision_operators
from gradgraph import surgery
from gradgraph.chat.decoder import Decoder
from gradgraph.chat.sampling import Sampling

BEGIN, END = "<!-- optimum: begin -->", "<!-- optimum: end -->"
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
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16}),
    "phi": ("Phi", SIZES | {"num_key_value_heads": 4}),
    "phi3": ("Phi3", SIZES | {"original_max_position_embeddings": 128}),
}  # fmt: skip
IDS = np.random.default_rng(0).integers(3, WORDS, (2, 17))


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
    main_export(str(folder / "theirs"), folder / task, task=task, do_validation=False)
    return network, folder / task


def scores(model: Any, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    model = surgery.language_model(model, keep=() if mask is None else "attention_mask")
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    return trainer.predict(ids if mask is None else {"input_ids": ids, "attention_mask": mask})


def of_torch(network: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    return np.asarray(network(torch.tensor(ids)).logits.detach().numpy())


def by_scores(network: Any, folder: Path) -> None:
    """Scores, and those of rows that are padded on the left."""
    adapted, wanted = gg.lora(folder / "model.onnx", "*", rank=2), of_torch(network, IDS)
    np.testing.assert_allclose(scores(adapted, IDS), wanted, atol=3e-6)
    padded = np.pad(IDS, ((0, 0), (4, 0)), constant_values=9)
    mask = np.pad(np.ones_like(IDS), ((0, 0), (4, 0)))
    np.testing.assert_allclose(scores(adapted, padded, mask)[:, 4:], wanted, atol=3e-6)


def by_peft(network: Any, folder: Path) -> None:
    """Adapters of PEFT, loaded into the file, and saved for PEFT from there."""
    import peft
    import torch

    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    theirs = peft.get_peft_model(copy.deepcopy(network), config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:  # zeros at first
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder / "theirs")
    wanted = of_torch(theirs, IDS)
    assert np.abs(wanted - of_torch(network, IDS)).max() > 0.05
    model = surgery.load_adapter(folder / "model.onnx", folder / "theirs")
    np.testing.assert_allclose(scores(model, IDS), wanted, atol=3e-6)
    surgery.save_adapter(model, folder / "ours")
    read = peft.PeftModel.from_pretrained(copy.deepcopy(network), folder / "ours").eval()
    np.testing.assert_allclose(of_torch(read, IDS), wanted, atol=3e-6)


def by_answers(network: Any, folder: Path) -> None:
    """The likeliest tokens behind prompts of several lengths, with the cache that the file has.

    PyTorch's are those of the whole text so far: its own ``generate`` gives others for CodeGen.
    """
    prompts = [IDS[0, :5].tolist(), IDS[1, :9].tolist()]
    found = Decoder(folder / "model.onnx").generated(prompts, (), Sampling(max_tokens=6))
    for prompt, tokens in zip(prompts, found, strict=True):
        likeliest = of_torch(network, np.array([[*prompt, *tokens]]))[0].argmax(-1)
        assert tokens == likeliest[len(prompt) - 1 : -1].tolist()


CHECKS: dict[str, Callable[[Any, Path], None]] = {
    "scores": by_scores, "PEFT": by_peft, "answers": by_answers,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the table of the page")
    parser.add_argument("families", nargs="*", help="of these alone; they are not written")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = [f"| family | {' | '.join(TASKS.values())} |", "|---" * (len(TASKS) + 1) + "|"]
    for family in given.families or FAMILIES:
        lines.append(f"| {family} | {' | '.join(cell(family, task) for task in TASKS)} |")
        print(lines[-1], flush=True)
    if given.save and not given.families:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
