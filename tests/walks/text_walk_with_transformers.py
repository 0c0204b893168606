"""The same with Hugging Face's Trainer: datasets, a fast tokenizer, a collator that pads, and figures from evaluate."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import text_network
import torch
from torch import nn


class Network(nn.Module):
    """The encoder, as the Trainer wants one; a user has AutoModelForSequenceClassification, and not these lines."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.encoder = text_network.classifier(seed)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.encoder(input_ids, attention_mask)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


# --- what a user writes


def accuracy(folder: Path, epochs: int, seed: int) -> float:
    from datasets import load_dataset
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerFast, Trainer, TrainingArguments

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]", model_max_length=text_network.LONGEST,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    files = {part: str(folder / f"{part}.csv") for part in ("train", "test")}
    data = load_dataset("csv", data_files=files, cache_dir=str(folder / "cache")).class_encode_column("about")
    names = data["train"].features["about"].names
    data = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])
    trainer = Trainer(
        model=Network(seed),
        args=TrainingArguments(
            output_dir=str(folder / "transformers"), learning_rate=2e-3, num_train_epochs=epochs, seed=seed,
            per_device_train_batch_size=32, report_to="none", disable_tqdm=True,
        ),
        train_dataset=data["train"].rename_column("about", "labels"),
        eval_dataset=data["test"].rename_column("about", "labels"),
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": np.mean(found.predictions.argmax(1) == found.label_ids)},
    )  # fmt: skip
    trainer.train()
    figures = trainer.evaluate()
    shares = torch.tensor(trainer.predict(data["test"].rename_column("about", "labels")).predictions).softmax(1)
    with (folder / "with_transformers.csv").open("w", encoding="utf-8") as file:
        file.write(",".join(["class", *names]) + "\n")
        file.writelines(",".join([names[row.argmax()], *map(str, row.tolist())]) + "\n" for row in shares)
    return float(figures["eval_accuracy"])


if __name__ == "__main__":
    print(accuracy(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
