"""Questions on contexts, with the windows, labels and answers that transformers' example run_qa.py makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.chat import small_folder

LENGTH, STRIDE = 32, 7
CLS, SEP = 1, 2


def tokenizer() -> Any:
    from tokenizers import processors

    made = small_folder.tokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", CLS), ("</s>", SEP)]
    )
    return made


def rows(count: int, with_none: bool = True) -> list[dict[str, Any]]:
    rng, found = np.random.default_rng(0), []
    for i in range(count):
        context = "".join(rng.choice(list("abcdefgh ."), int(rng.integers(4, 90)))).strip() or "a"
        start = int(rng.integers(len(context)))
        text = context[start : start + int(rng.integers(1, 9))]
        answers = {"text": [text], "answer_start": [start]}
        if with_none and i % 4 == 3:
            answers = {"text": [], "answer_start": []}
        found.append({"id": f"q{i}", "question": f" {'who?' * int(rng.integers(1, 3))}", "context": context,
                      "answers": answers})  # fmt: skip
    return found


def as_in_run_qa(data: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The windows of run_qa.py of transformers, with its loops; the index stays in the context, as in its course."""
    runner = tokenizer()
    runner.enable_truncation(max_length=LENGTH, stride=STRIDE, strategy="only_second")
    found = []
    for row in data:
        whole = runner.encode(row["question"].lstrip(), row["context"])
        for one in (whole, *whole.overflowing):
            of, offsets, answers = one.sequence_ids, one.offsets, row["answers"]
            first, last = of.index(1), len(of) - 1 - of[::-1].index(1)
            label = (one.ids.index(CLS),) * 2
            if answers["text"]:
                start, end = answers["answer_start"][0], answers["answer_start"][0] + len(answers["text"][0])
                if offsets[first][0] <= start and offsets[last][1] >= end:
                    i, k = first, last
                    while i <= last and offsets[i][0] <= start:
                        i += 1
                    while offsets[k][1] >= end:
                        k -= 1
                    label = (i - 1, k + 1)
            found.append({"id": row["id"], "ids": one.ids, "types": one.type_ids, "label": label,
                          "offsets": [o if s == 1 else None for o, s in zip(offsets, of, strict=True)]})  # fmt: skip
    return found


def padded(values: list[list[int]], fill: int) -> np.ndarray:
    width = min(-(-max(map(len, values)) // 16) * 16, LENGTH)
    return np.array([[*row, *[fill] * (width - len(row))] for row in values])


def best_answer(row: dict[str, Any], windows: list[dict[str, Any]], starts: Any, ends: Any) -> str:
    """As postprocess_qa_predictions of transformers' example chooses it, for data in which some have no answer."""
    best, text, none = -np.inf, "", np.inf
    for window, s, e in zip(windows, starts, ends, strict=True):
        if window["id"] != row["id"]:
            continue
        none, offsets = min(none, s[0] + e[0]), window["offsets"]
        s, e = s[: len(offsets)], e[: len(offsets)]
        for i in np.argsort(s)[-20:]:
            for k in np.argsort(e)[-20:]:
                if offsets[i] and offsets[k] and i <= k < i + 30 and s[i] + e[k] > best:
                    best, text = s[i] + e[k], row["context"][offsets[i][0] : offsets[k][1]]
    return "" if none > best else text
