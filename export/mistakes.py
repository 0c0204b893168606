"""A page of a classifier's mistakes: confusion matrix, most frequent confusions and worst samples, with pictures."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradgraph.export.pages import escaped, heading, table, text_of, whole_page
from gradgraph.files.atomic import write_atomically
from gradgraph.files.suffixes import check_suffix
from gradgraph.runtime.execution.class_table import ClassTable
from gradgraph.runtime.execution.confusions import Called, Confusions
from gradgraph.runtime.trainer import Trainer

MOST_CLASSES = 40  # with more classes, the page has no confusion matrix


def save_mistakes(
    trainer: Trainer,
    data: Any,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    scores: Mapping[str, float] | None = None,
    batch_size: int | None = None,
    averaged: bool = True,
) -> Confusions:
    """Write a page of a classifier's mistakes on held-out data; a single HTML file that works offline.

    Args:
        trainer: the trainer of the classifier.
        data: the data, as for ``Trainer.evaluate``; images are shown on the page.
        path: the path of the page.
        title: the title; by default the name of the file.
        scores: metrics to show at the top, such as the result of ``Trainer.evaluate``.
        batch_size, averaged: as for ``Trainer.evaluate``.

    Returns:
        The contents of the page.

    Raises:
        DataError: if the data do not match the step, or the step is not a classifier.
        OutputError: if ``path`` cannot be written.
    """
    check_suffix(path, ".html")
    found = trainer.confusions(data, batch_size, averaged=averaged)
    write_atomically(path, page(title or Path(path).stem, found, scores or {}).encode())
    return found


def page(title: str, found: Confusions, scores: Mapping[str, float]) -> str:
    """Return the HTML of the page that shows ``found``."""
    facts = {"accuracy": f"{found.table.accuracy:.4f}", "samples": f"{int(found.table.samples.sum()):,}",
             **{name: f"{value:.4g}" for name, value in scores.items() if name != "accuracy"}}  # fmt: skip
    parts = [heading(title, facts), _matrix(found.table)]
    if found.pairs:
        parts.append("<h2>Confused most often</h2>")
    for pair in found.pairs:
        words = f"<b>{escaped(pair.label)}</b> called <b>{escaped(pair.called)}</b>: {pair.count:,}"
        parts.append(f"<h3>{words}</h3>{_gallery(pair.samples)}")
    parts += ["<h2>Largest losses</h2>", _gallery(found.worst), _classes(found.table)]
    return whole_page(title, "\n".join(parts), text_of("mistakes.css"))


def _gallery(samples: Iterable[Called]) -> str:
    return f'<div class="gallery">{"".join(map(_figure, samples))}</div>'


def _figure(one: Called) -> str:
    name = Path(one.file).name if one.file else f"sample {one.index:,}"
    alone = f'<span class="none">{escaped(name)}</span>'
    picture = one.markup.replace('alt=""', f'alt="{escaped(name)}"', 1) if one.picture else alone
    sure = "" if one.probability != one.probability else f" {one.probability:.0%}"
    kind = "right" if one.label == one.called else "wrong"
    caption = f"{escaped(one.label)} → <b>{escaped(one.called)}</b>{sure}, loss {one.loss:.3g}"
    title = escaped(one.file or name)
    return f'<figure class="{kind}" title="{title}">{picture}<figcaption>{caption}</figcaption></figure>'


def _matrix(table: ClassTable) -> str:
    """Return the HTML of the confusion matrix; empty if there are more than ``MOST_CLASSES`` classes."""
    if len(table.names) > MOST_CLASSES:
        return ""
    head = "".join(f'<th class="number" scope="col">{escaped(name)}</th>' for name in table.names)
    rows = [
        f'<tr><th scope="row">{escaped(name)}</th>{"".join(_cells(row, i))}</tr>'
        for i, (name, row) in enumerate(zip(table.names, table.matrix.tolist(), strict=True))
    ]
    return (f'<h2>Confusion matrix</h2><p class="hint">A row for each true class, a column for each predicted one.</p>'
            f'<div class="wide"><table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{"".join(rows)}'
            "</tbody></table></div>")  # fmt: skip


def _cells(row: Sequence[int], own: int) -> Iterable[str]:
    whole = sum(row) or 1
    for j, count in enumerate(row):
        kind = "right" if j == own else "wrong"
        share = (count / whole) ** 0.5  # small shares stay visible, too
        yield f'<td class="number {kind}" style="--share: {share:.3f}">{count or "·"}</td>'


def _classes(found: ClassTable) -> str:
    rows = [
        [row["class"], *(f"{float(row[key]):.4f}" for key in ("precision", "recall", "f1")), f"{int(row['samples']):,}"]
        for row in found.rows()
    ]
    return f"<h2>Classes</h2>{table(('class', 'precision', 'recall', 'F1', 'samples'), rows)}"
