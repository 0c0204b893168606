"""TRL's trainers of preferences beside ours, on the same weights and data: the losses of ten steps.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradgraph as gg
from gradgraph import surgery
from tests.surgery import language_families as families

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
    layers = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # the builder packs q, k and v
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=layers, alpha_pattern={"v_proj": 20})
    with_adapters = peft.get_peft_model(network, config)
    with_adapters.save_pretrained(folder / "adapter")
    return folder / "hf", folder / "adapter", families.build(folder / "hf", folder / "out", "fp32", "cpu")


def orpo_of_answers() -> Any:
    """TRL's trainer whose likelihood is that of the answer alone, as in the paper and here; TRL counts prompts, too."""
    from trl.experimental.orpo import ORPOTrainer

    class OfAnswers(ORPOTrainer):
        def concatenated_forward(self, model: Any, batch: Any) -> Any:
            found = super().concatenated_forward(model, batch)
            return (*found[:4], -found[0].mean())

    return OfAnswers


def trainer_of(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """TRL's trainer, its configuration and what that has for this loss."""
    if kind in ("sigmoid", "ipo"):
        return trl.DPOTrainer, trl.DPOConfig, {"loss_type": kind, "beta": BETA, "max_length": None}
    if kind == "kto":
        return trl.KTOTrainer, trl.KTOConfig, {"beta": BETA, "max_length": None}
    if kind == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig, {"loss_type": kind, "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7}
    from trl.experimental.orpo import ORPOConfig

    return orpo_of_answers(), ORPOConfig, {"beta": BETA}


GOOD = [bool(i % 3) for i in range(len(ROWS))]
ONE_ANSWER = [{"prompt": r["prompt"], "completion": r["chosen"], "label": g} for r, g in zip(ROWS, GOOD, strict=True)]


def of_trl(network: Path, adapter: Path, out: Path, kind: str) -> list[float]:
    import datasets
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(network, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trainer_class, config, own = trainer_of(kind)
    options = config(
        output_dir=str(out), per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=RATE,
        lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0, max_grad_norm=0.0, logging_steps=1,
        report_to="none", use_cpu=True, bf16=False, train_sampling_strategy="sequential",
        gradient_checkpointing=False, disable_dropout=True, save_strategy="no", **own,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(network)
    data = datasets.Dataset.from_list(ONE_ANSWER if kind == "kto" else ROWS)
    trainer = trainer_class(model, args=options, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


LOSSES = {"sigmoid": gg.losses.dpo(BETA), "ipo": gg.losses.ipo(BETA), "kto": gg.losses.kto(BETA),
          "orpo": gg.losses.orpo(BETA), "simpo": gg.losses.simpo(2.0, 0.7)}  # fmt: skip


def ours(file: Path, adapter: Path, kind: str) -> list[float]:
    adapted = surgery.load_adapter(file, adapter)
    step = gg.build(surgery.pair_model(surgery.language_model(adapted)), LOSSES[kind], gg.optim.adam(RATE))
    trainer = gg.Trainer(step, device="cpu")
    begin = [1] if kind in ("orpo", "simpo") else []  # which these two of TRL's put before each prompt
    prompts = [begin + tokens(row["prompt"]) for row in ROWS]
    first, second = ([[*tokens(row[name]), 2] for row in ROWS] for name in ("chosen", "rejected"))
    at = range(0, len(ROWS), PAIRS)
    if kind == "kto":  # that of the row before, within a batch
        second = [first[i + (k - 1) % PAIRS] for i in at for k in range(PAIRS)]
    data = surgery.answer_pairs(prompts, first, second)
    if kind == "kto":
        data["desirable"] = np.array(GOOD, np.float32)
    if kind not in ("orpo", "simpo"):
        data["target"] = surgery.reference(adapted, trainer, data, PAIRS)
    return [float(trainer.step({n: a[i : i + PAIRS] for n, a in data.items()})["loss"]) for i in at]


@pytest.mark.parametrize("kind", LOSSES)
def test_ten_steps_have_the_losses_of_trl(started: tuple[Path, Path, Path], kind: str, tmp_path: Path) -> None:
    network, adapter, file = started
    theirs, found = of_trl(network, adapter, tmp_path, kind), ours(file, adapter, kind)
    assert len(theirs) == STEPS
    assert np.ptp(theirs) > 1e-2
    np.testing.assert_allclose(found, theirs, atol=1e-5, rtol=1e-5)
