"""Language models of files beside their modules in PyTorch: scores, adapters of PEFT and losses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np

import gradgraph as gg
from gradgraph import surgery
from tests.surgery.language_families import WORDS

IDS = np.random.default_rng(0).integers(3, WORDS, (2, 17))
STEPS, RATE = 4, 1e-3


def scores(model: Any, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    model = surgery.language_model(model, keep=() if mask is None else "attention_mask")
    trainer = gg.Trainer(gg.build(model, gg.losses.cross_entropy(axis=-1)), device="cpu")
    return trainer.predict(ids if mask is None else {"input_ids": ids, "attention_mask": mask})


def of_torch(network: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    return np.asarray(network(torch.tensor(ids)).logits.detach().numpy())


def with_adapter(network: Any, folder: Path, **options: Any) -> Any:
    """A copy of the module with an adapter of PEFT that says something, which lies in ``folder``, too."""
    import peft
    import torch

    torch.manual_seed(1)
    options = {"target_modules": "all-linear"} | options
    theirs = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(r=4, lora_alpha=6, **options)).eval()
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:  # zeros at first
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder)
    return theirs


def losses(theirs: Any, model: Any) -> tuple[list[float], list[float]]:
    """Those of some steps of AdamW on one batch: PyTorch's, and of the file with the same adapter."""
    import torch

    data = surgery.next_tokens(IDS)
    step = gg.build(
        surgery.language_model(model), gg.losses.cross_entropy(axis=-1), gg.optim.adamw(RATE, weight_decay=0.0)
    )
    trainer = gg.Trainer(step, device="cpu")
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], RATE, weight_decay=0.0)
    wanted, found = [], []
    for _ in range(STEPS):
        logits = theirs(torch.tensor(data["input_ids"])).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(data["target"]).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
        found.append(float(trainer.step(data)["loss"]))
    return wanted, found
