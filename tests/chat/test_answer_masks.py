"""What is learnt of an answer are all its tokens, from the first to the last, and none of the prompt's."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradgraph.chat import Encoder, read
from gradgraph.data.texts.tokenizer import Tokenizer as Ours
from gradgraph.errors import DataError

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


# --- characters without a token -------------------------------------------------------------------------------------

KNOWN, FOREIGN = "abc de", "\N{FOX FACE}\u65e5\u0301\u00e9"
SEPARATED = (
    "{% for m in messages %}<|begin|>{{ m.role[0] }}<|endoftext|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>a<|endoftext|>{% endif %}"
)


def characters(unknown: str | None, words: bool = False, **options: Any) -> Tokenizer:
    """A BPE of characters; without an unknown token, it drops those that it does not know."""
    letters = [*KNOWN, "u", "ab", "ca", *([unknown] if unknown else [])]
    merges = [("a", "b"), ("c", "a")]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(letters)}, merges, unk_token=unknown, **options))
    if words:
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def some_bytes() -> Tokenizer:
    """The bytes of \u00e9 have tokens, those of other characters do not."""
    letters = [pair for c in (*KNOWN, "u", "\u00e9") for pair in pre_tokenizers.ByteLevel(False).pre_tokenize_str(c)]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(sorted({c for piece, _ in letters for c in piece}))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def word_pieces() -> Tokenizer:
    pieces = ["[UNK]", *KNOWN, "u", "ab", "##c", "##d"]
    made = Tokenizer(models.WordPiece({t: i for i, t in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return made


def unigrams() -> Tokenizer:
    pieces = [("<unk>", 0.0), *((t, -2.0) for t in KNOWN), ("u", -2.0), ("ab", -3.0), ("ca", -3.5)]
    return Tokenizer(models.Unigram(pieces, 0, False))


RANDOM: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level, "some bytes": some_bytes, "characters": lambda: characters("?"),
    "characters, fused": lambda: characters("?", fuse_unk=True), "dropped": lambda: characters(None),
    "dropped in words": lambda: characters(None, words=True), "word pieces": word_pieces, "unigrams": unigrams,
}  # fmt: skip


def shifts(made: Tokenizer, texts: list[str]) -> bool:
    """Whether a word has a character without tokens before one with tokens: each is encoded alone."""
    splits = made.pre_tokenizer
    words = [w for text in texts for w, _ in (splits.pre_tokenize_str(text) if splits else [(text, (0, 0))])]
    known = made.get_vocab()
    return any(
        made.model.unk_token is None and any(c not in known for c in word.rstrip("".join({*word} - known.keys())))
        for word in words
    )


@pytest.mark.parametrize("name", RANDOM)
def test_masks_of_random_texts_are_those_of_their_parts(name: str, tmp_path: Path) -> None:
    """Special tokens separate the parts, so that each can be encoded alone; wrong spans are rejected."""
    made, rng = RANDOM[name](), random.Random(0)
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    encoder = Encoder(folder_of(made, tmp_path))
    (tmp_path / "chat_template.jinja").write_text(SEPARATED)
    rejected = 0
    for _ in range(60):
        letters = KNOWN * 3 + (FOREIGN if rng.random() < 0.7 else "")
        said = ["".join(rng.choices(letters, k=rng.randint(1, 9))) + "a" for _ in range(2)]
        rows = read(
            [{"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]}]
        )
        if type(made.model).__name__ == "BPE" and shifts(made, said):
            rejected += 1
            with pytest.raises(DataError, match=r"has no token for .* \(U\+[0-9A-F]+\) and drops it"):
                encoder(rows)
            continue
        around = [("<|begin|>", role, "<|endoftext|>", text, "<|end|>") for role, text in zip("ua", said, strict=True)]
        parts = list(itertools.chain(*around))
        encoded = [made.encode(part, add_special_tokens=False).ids for part in parts]
        (tokens,) = encoder(rows)
        assert tokens.ids.tolist() == [*itertools.chain(*encoded)]
        assert tokens.learnt.tolist() == [i >= 8 for i, part in enumerate(encoded) for _ in part]
    assert (rejected > 0) == (name in ("some bytes", "dropped", "dropped in words"))


def test_a_dropped_character_is_named_only_if_it_misplaces_tokens(tmp_path: Path) -> None:
    characters(None, words=True).save(str(tmp_path / "tokenizer.json"))
    ours = Ours(tmp_path / "tokenizer.json")
    assert list(ours.spans(["ab \u65e5 c\u65e5 d"], False)) == [([7, 2, 4], [(0, 2), (5, 6), (8, 9)])]
    with pytest.raises(DataError, match=r"'\u65e5' \(U\+65E5\)"):
        list(ours.spans(["ab", "a\u65e5b"], False))
    with pytest.raises(DataError, match=r"'\u65e5' \(U\+65E5\)"):
        list(ours.windows([("a", "a\u65e5b")], 8, 0))
    assert list(ours.ids(["a\u65e5b"], False)) == [[7]], "the tokens alone are known"
