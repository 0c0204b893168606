"""TRL's DPO trainer beside ours, on the same weights and data: the losses of ten steps.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from surgery import language_families as families

import gradgraph as gg
from gradgraph import surgery

trl = pytest.importorskip("trl", reason="in no extra; `make shipped-models` runs these tests with it")
torch = pytest.importorskip("torch", reason="TRL trains modules of PyTorch")
peft = pytest.importorskip("peft", reason="TRL's adapters are PEFT's")
pytest.importorskip("onnxruntime_genai", reason="its builder writes the file that is trained here")
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS, PAIRS, RATE, BETA = 10, 4, 1e-2, 0.2
RNG = np.random.default_rng(0)


def words(least: int, most: int) -> str:
    return "".join(chr(n) for n in RNG.integers(ord("!"), ord("~"), RNG.integers(least, most)))


ROWS = [{"prompt": words(2, 9), "chosen": words(1, 9), "rejected": words(1, 9)} for _ in range(STEPS * PAIRS)]


def tokens(text: str) -> list[int]:
    return [ord(letter) - ord(" ") + 3 for letter in text]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def started(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The folder of the network, one with adapters of PEFT that say something, and the file of the builder."""
    folder = tmp_path_factory.mktemp("trl")
    network = families.write_network(request.param, folder / "hf")
    torch.manual_seed(1)
    layers = ["o_proj", "gate_proj", "up_proj", "down_proj"]  # the builder packs the others, which have more to train
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers)
    with_adapters = peft.get_peft_model(network, config)
    with_adapters.save_pretrained(folder / "adapter")
    return folder / "hf", folder / "adapter", families.build(folder / "hf", folder / "out", "fp32", "cpu")


def of_trl(network: Path, adapter: Path, out: Path, kind: str) -> list[float]:
    import datasets
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(network, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    options = trl.DPOConfig(
        output_dir=str(out), per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=RATE, beta=BETA,
        lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0, max_grad_norm=0.0, logging_steps=1,
        report_to="none", use_cpu=True, bf16=False, train_sampling_strategy="sequential", loss_type=kind,
        gradient_checkpointing=False, disable_dropout=True, max_length=None, save_strategy="no",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(network)
    data = datasets.Dataset.from_list(ROWS)
    trainer = trl.DPOTrainer(model, args=options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def ours(file: Path, adapter: Path, kind: str) -> list[float]:
    adapted = surgery.load_adapter(file, adapter)
    loss = gg.losses.dpo(BETA) if kind == "sigmoid" else gg.losses.ipo(BETA)
    step = gg.build(surgery.pair_model(surgery.language_model(adapted)), loss, gg.optim.adam(RATE))
    trainer = gg.Trainer(step, device="cpu")
    prompts, chosen, rejected = ([tokens(row[name]) for row in ROWS] for name in ("prompt", "chosen", "rejected"))
    data = surgery.answer_pairs(prompts, [[*a, 2] for a in chosen], [[*a, 2] for a in rejected])
    data["target"] = surgery.reference(adapted, trainer, data, PAIRS)
    at = range(0, len(ROWS), PAIRS)
    return [float(trainer.step({n: a[i : i + PAIRS] for n, a in data.items()})["loss"]) for i in at]


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_ten_steps_have_the_losses_of_trl(started: tuple[Path, Path, Path], kind: str, tmp_path: Path) -> None:
    network, adapter, file = started
    theirs, found = of_trl(network, adapter, tmp_path, kind), ours(file, adapter, kind)
    assert len(theirs) == STEPS
    assert np.ptp(theirs) > 1e-2
    np.testing.assert_allclose(found, theirs, atol=1e-5, rtol=1e-5)
