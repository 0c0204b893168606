"""Files of tagged words in CoNLL format: one word per line with its tag last, and an empty line after each sentence."""

from __future__ import annotations

import os

from gradgraph.errors import DataError, shown
from gradgraph.files.untrusted.regular import UnreadableError, regular_text

SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
LARGEST = 1 << 30  # bytes
WORDS, TAGS = "words", "tags"


def read_sentences(path: str | os.PathLike[str]) -> dict[str, list[list[str]]]:
    """Return the words and tags of each sentence: the first and last field of each line, split at tabs or else spaces.

    ``-DOCSTART-`` lines are skipped, and comments: lines that begin with ``#`` and differ in their number of fields
    from the line of the first word. Without a second field, there are no tags.

    Raises:
        DataError: the file cannot be read, its lines differ in their number of fields, or it has no words.
    """
    try:
        text = regular_text(path, LARGEST)
    except UnreadableError as error:
        raise DataError(f"'{shown(path)}' cannot be read ({error}); check the file") from None
    sentences: list[list[list[str]]] = [[]]
    fields = 0
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip("\r")
        parts = line.split("\t") if "\t" in line else [part for part in line.split(" ") if part]
        if not line.strip() or parts[0] == "-DOCSTART-":
            sentences += [[]] if sentences[-1] else []
        elif len(parts) == fields or (not fields and not line.startswith("#")):
            fields = len(parts)
            sentences[-1].append(parts)
        elif not line.startswith("#"):
            raise DataError(
                f"line {number} of '{shown(path)}' has {len(parts)} fields, but the first word has {fields}; give each "
                "word a line with the same number of fields, and each sentence an empty line after it"
            )
    found = [sentence for sentence in sentences if sentence]
    if not found:
        raise DataError(f"'{shown(path)}' contains no words; write one word per line, with its tag last")
    columns = {WORDS: [[parts[0] for parts in sentence] for sentence in found]}
    return columns if fields == 1 else {**columns, TAGS: [[parts[-1] for parts in sentence] for sentence in found]}
