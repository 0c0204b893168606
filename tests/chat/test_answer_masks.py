"""What is learnt of an answer are all its tokens, from the first to the last, and none of the prompt's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradgraph.chat import Encoder, read

pytest.importorskip("tokenizers", reason="the extra [llm] is not installed")
pytest.importorskip("jinja2", reason="the extra [llm] is not installed")

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEMPLATE = (
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
SPECIAL = ("<|begin|>", "<|end|>", "<|endoftext|>")
CODE = ["def f(x):\n        if x:\n            return 1\n", "naïve  😀😀 日本語\t\tx", "  True  ", "user\nassistant\n"]


def byte_level(processor: Any = None, **added: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CODE * 20, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    made.add_special_tokens([AddedToken(token, special=True, **added) for token in SPECIAL])
    if processor is not None:
        made.post_processor = processor
    return made


def roberta() -> Tokenizer:
    made = byte_level()
    end = (SPECIAL[2], made.token_to_id(SPECIAL[2]))
    made.post_processor = processors.RobertaProcessing(end, end, trim_offsets=True, add_prefix_space=False)
    return made


def in_sequence() -> Tokenizer:
    return byte_level(processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.ByteLevel()]))


def sentences(prepends: bool) -> Tokenizer:
    """As Llama 2 has it: spaces are characters of words, and bytes stand for what no token has."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": 1 + i for i in range(256)}}
    for word in ("▁", "▁▁", "▁▁▁▁", "x", "if", "▁if", "e", "▁x", *"abcdfghijklmnopqrstuvwyzATF:()1\n"):
        vocabulary.setdefault(word, len(vocabulary))
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "x")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prepends else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return made


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes, trimmed": lambda: byte_level(processors.ByteLevel(trim_offsets=True)),
    "bytes, trimmed in a sequence": in_sequence,
    "RoBERTa": roberta,
    "special tokens take what follows": lambda: byte_level(rstrip=True),
    "special tokens take what is before": lambda: byte_level(lstrip=True),
    "special tokens take both, trimmed": lambda: byte_level(
        processors.ByteLevel(trim_offsets=True), lstrip=True, rstrip=True
    ),
    "sentences": lambda: sentences(False),
    "sentences behind a space": lambda: sentences(True),
}
ANSWERS = [
    CODE[0] + "    return  1",
    "  True,   naïve 😀  ",
    "😀",
    "\n\n",
    "   x",
    "日本語 ",
    "a   b    c",
    "a\n\n  b\t",
    "x",
]


def folder_of(made: Tokenizer, folder: Path) -> Path:
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def by_beginnings(made: Tokenizer, text: str, begin: int, end: int) -> list[bool]:
    """From the first token that is another one without the answer, to the last that needs its end."""
    whole, before, upto = (made.encode(t, add_special_tokens=False).ids for t in (text, text[:begin], text[:end]))
    same = [
        sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(whole, t, strict=False))) for t in (before, upto)
    ]
    return [same[0] <= i < same[1] for i in range(len(whole))]


@pytest.mark.parametrize("answer", [a for a in ANSWERS if a.strip()])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_mask_is_that_of_beginnings(name: str, answer: str, tmp_path: Path) -> None:
    """The text ends with the answer, so that the tokens of its beginning are those of the whole."""
    made = TOKENIZERS[name]()
    encoder = Encoder(folder_of(made, tmp_path))
    (tokens,) = encoder(
        read([{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]}])
    )
    text = f"<|begin|>user\nx<|end|>\n<|begin|>assistant\n{answer}<|end|>\n"
    assert tokens.ids.tolist() == made.encode(text, add_special_tokens=False).ids
    begin = text.index("assistant\n") + len("assistant\n")
    assert tokens.learnt.tolist() == by_beginnings(made, text, begin, len(text))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_turns_that_follow_are_not_learnt(name: str, tmp_path: Path) -> None:
    made = TOKENIZERS[name]()
    encoder = Encoder(folder_of(made, tmp_path))
    said = [{"role": r, "content": c} for a in ANSWERS if a.strip() for r, c in (("user", "  x "), ("assistant", a))]
    (tokens,) = encoder(read([{"messages": said}]))
    begun, number = made.token_to_id("<|begin|>"), made.token_to_id("<|end|>")
    ids, learnt = tokens.ids.tolist(), tokens.learnt.tolist()
    assert not any(learnt[i] for i, n in enumerate(ids) if n == begun)
    ends = [i for i, n in enumerate(ids) if n == number]
    assert [learnt[i] for i in ends] == [False, True] * (len(ends) // 2)
    starts = [i for i in range(1, len(ids)) if learnt[i] and not learnt[i - 1]]
    stops = [i for i in range(len(ids)) if learnt[i] and (i + 1 == len(ids) or not learnt[i + 1])]
    assert len(starts) == len(stops) == len(ends) // 2, "each answer is one piece without holes"


@pytest.mark.parametrize(
    "row", [{"prompt": "code:", "completion": "  a   b  "}, {"text": "   x     y  z  "}], ids=["completion", "text"]
)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_as_they_stand_have_no_holes(name: str, row: dict[str, str], tmp_path: Path) -> None:
    made = TOKENIZERS[name]()
    (tokens,) = Encoder(folder_of(made, tmp_path), "none")(read([row]))
    learnt = tokens.learnt.tolist()
    first = learnt.index(True)
    assert all(learnt[first:])
    around = 1 if name == "RoBERTa" else 0
    assert first == (
        len(made.encode(row.get("prompt", ""), add_special_tokens=False).ids) + around if "prompt" in row else first
    )
    if "text" in row:
        assert first == around
