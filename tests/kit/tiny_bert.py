"""A tokenizer, texts and BERT-like models that are small enough to train in a test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from gradgraph import frontend
from gradgraph.frontend import Input, nn

GOOD, BAD, THINGS = ["kind", "bright", "calm", "brave"], ["rude", "dull", "loud", "mean"], ["fox", "owl", "cat", "dog"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def tokenizer(path: Path, left: bool = False) -> Path:
    """Write a WordPiece tokenizer in the layout of BERT's, whose words of more than four letters have two tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = [*SPECIAL, "the", "is", ",", "wonder", "##fully", *GOOD, *BAD, *THINGS]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    if left:
        made.enable_padding(direction="left", pad_id=0)
    made.save(str(path))
    return path


def sentences(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return texts of different lengths, and their labels, "good" or "bad" by the words that they contain."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for is_good in rng.integers(0, 2, count):
        said = rng.choice(GOOD if is_good else BAD, rng.integers(1, 8))
        texts.append(f"the {', '.join(said)} {rng.choice(THINGS)}")
        labels.append("good" if is_good else "bad")
    return texts, labels


class Encoder(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.types, self.places = (nn.Embedding(n, width) for n in (64, 2, 64))
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: frontend.Tensor, mask: frontend.Tensor, types: frontend.Tensor) -> frontend.Tensor:
        x = self.words(ids) + self.types(types) + self.places.weight[: ids.shape[1]]
        return self.layer(x, src_key_padding_mask=mask == 0)


class Classifier(nn.Module):
    def __init__(self, classes: int, of_tokens: bool = False) -> None:
        super().__init__()
        self.encoder, self.head, self.of_tokens = Encoder(), nn.Linear(16, classes), of_tokens

    def forward(
        self, input_ids: frontend.Tensor, attention_mask: frontend.Tensor, token_type_ids: frontend.Tensor
    ) -> frontend.Tensor:
        found = self.encoder(input_ids, attention_mask, token_type_ids)
        return self.head(found if self.of_tokens else found[:, 0])


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(16, 1)

    def forward(
        self, input_ids: frontend.Tensor, attention_mask: frontend.Tensor, token_type_ids: frontend.Tensor
    ) -> frontend.Tensor:
        flat = (x.reshape(-1, x.shape[2]) for x in (input_ids, attention_mask, token_type_ids))
        return self.head(self.encoder(*flat)[:, 0]).reshape(-1, input_ids.shape[1])


def classifier(classes: int = 2, of_tokens: bool = False, tokens: str | int = "tokens") -> onnx.ModelProto:
    """Return a model of texts [rows, tokens] -> [rows, classes], or of tokens -> [rows, tokens, classes]."""
    frontend.manual_seed(0)
    inputs = {name: Input(("rows", tokens), "int64") for name in NAMES}
    return frontend.export(Classifier(classes, of_tokens), inputs, outputs=["logits"])


def chooser(choices: int = 3) -> onnx.ModelProto:
    """Return a model of choices [rows, choices, tokens] -> [rows, choices]."""
    frontend.manual_seed(0)
    inputs = {name: Input(("rows", choices, "tokens"), "int64") for name in NAMES}
    return frontend.export(Chooser(), inputs, outputs=["logits"])
