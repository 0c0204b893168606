"""Recordings and their transcripts, as sounds and tokens in batches for an encoder with a decoder (Whisper)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradgraph.arguments import PATH, described
from gradgraph.chat.sound_features import Features, features_of, is_whisper
from gradgraph.chat.speech_prompts import Prompt, prompt_of_text, prompt_of_whisper, write_prompt
from gradgraph.chat.task_request import Request
from gradgraph.chat.text_pairs import Pairs, check_tokens, start_of
from gradgraph.data.arrays.batch import Array
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.specs import TensorSpec, numpy_dtype
from gradgraph.data.sounds import check_sounds, length_at, opened_sound, read_sound
from gradgraph.data.texts.records import Records, records_in
from gradgraph.errors import ArgumentError, DataError, listed, shown, suggestion
from gradgraph.files.digest import digest_of
from gradgraph.files.mapped import pieces_of
from gradgraph.files.untrusted.regular import open_regular

log = logging.getLogger("gradgraph.chat")

# usual names of the columns, of which the data may have one for each
NAMES = {"audio": ("audio", "file_name", "file", "path"), "text": ("text", "sentence", "transcription", "transcript")}
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # in a folder of Hugging Face's audiofolder
POSITIONS, LONGEST = ("max_target_positions", "max_position_embeddings"), 448  # of Whisper, and of Moonshine


class Recordings(Pairs):
    """WAV files as their encoder reads them, and their transcripts as tokens; see :class:`Pairs`.

    Args:
        files: the WAV files.
        features: what the encoder reads of a recording.
        answers, start, pad, most: as for :class:`Pairs`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        features: Features,
        answers: Sequence[Sequence[int]],
        start: int,
        pad: int,
        most: int,
    ) -> None:
        super().__init__(answers, start, pad, most)
        self.files, self.features, self.provides = files, features, features.provides

    def __getitem__(self, i: int) -> Array:
        """Return what the encoder reads of recording ``i``: float32 [mels, frames], or [samples]."""
        return self.features(read_sound(self.files[i], self.features.rate))

    def selected(self, numbers: Sequence[int]) -> Recordings:
        """Return the rows with these indices."""
        files, answers = [self.files[i] for i in numbers], [self.answers[i] for i in numbers]
        return Recordings(files, self.features, answers, self.start, self.pad, self.most)

    @property
    def content(self) -> Any:
        """The digest of each file, and the tokens of its transcript."""
        return [[_digest(file), list(answer)] for file, answer in zip(self.files, self.answers, strict=True)]

    def first(self, i: int, decode: Callable[[Sequence[int]], str]) -> str:
        """Return the name and the duration of recording ``i``, and the start token."""
        opened = opened_sound(self.files[i])
        return f"{shown(self.files[i])}, {opened.frames / opened.rate:.1f} s\n{decode([self.start])}"

    def _read(self, batches: Iterator[Sequence[int]]) -> Iterator[tuple[Sequence[int], dict[str, Array]]]:
        for rows in prefetched_samples(batches, lambda i: (i, self[i]), None):
            yield [i for i, _ in rows], self.features.batch([sound for _, sound in rows])

    def _fits(self, spec: TensorSpec) -> bool:
        return numpy_dtype(spec.dtype).kind == "f" and len(spec.shape) == self.features.axes


def _digest(file: Path) -> str:
    with open_regular(file) as content:
        return digest_of(pieces_of(content))


def read_recordings(request: Request, data: Any) -> Recordings:
    """Read a table of WAV files and transcripts, or a folder with one in ``metadata.csv``, as Hugging Face reads them.

    Paths are relative to the table. The tokens of a transcript are those of transformers: for Whisper language, task,
    no timestamps unless the text has some, the text, end of text; for Moonshine the text and its end.

    Raises:
        DataError: the data lack a column; a row has no recording or transcript, or is too long for the model; a
            recording cannot be read; or the folder has another feature extractor.
        ArgumentError: the language is unknown, or the model has none.
    """
    recipe, tokenizer = request.recipe, request.tokenizer
    if recipe.long == "cut":
        raise ArgumentError(
            f"the task {recipe.task} does not cut recordings, whose transcripts would no longer match",
            remedy="pass long='drop', or split long recordings",
            shell="pass --long drop, or split long recordings",
        )
    features, prompt, longest = features_of(request), prompt_of(request), request.longest(LONGEST, _positions(request))
    records, files, texts = _rows(request, data)
    answers = prompt.answers(request, texts, records.place)
    kept = []
    for i, (file, answer) in enumerate(zip(files, answers, strict=True)):
        check_tokens([answer], records.place(i), request.base.vocabulary)
        why = _too_long(file, answer, features, longest, records.place(i))
        if why is None:
            kept.append(i)
        elif recipe.long == "error":
            raise DataError(
                f"{records.place(i)} has {why}, which the model does not read",
                remedy="split the recording, or pass long='drop'",
                shell="split the recording, or pass --long drop",
            )
    if len(kept) < len(files):
        log.warning("%d rows of %s are too long; they are dropped", len(files) - len(kept), records.where)
    if not kept:
        raise DataError(f"no row of {records.where} remains; add shorter recordings")
    check_sounds([files[i] for i in kept], features.rate)
    return Recordings([files[i] for i in kept], features, [answers[i] for i in kept], start_of(request), tokenizer.pad,
                      longest)  # fmt: skip


def prompt_of(request: Request) -> Prompt:
    """Return the tokens around the transcripts of a folder's model; raise the errors of ``speech_prompts``."""
    return prompt_of_whisper(request) if is_whisper(request) else prompt_of_text(request)


def finish(request: Request) -> None:
    """Write the changed options of a tuned folder."""
    write_prompt(request, prompt_of(request))


def _positions(request: Request) -> str:
    """Return the key of the number of the decoder's positions in ``config.json``."""
    return next((key for key in POSITIONS if key in request.base.described), POSITIONS[0])


def _too_long(file: Path, answer: Sequence[int], features: Features, longest: int, place: str) -> str | None:
    """Return what of a row is too long, or None; raise DataError for a recording that is too short."""
    opened = opened_sound(file)
    samples = length_at(features.rate, opened)
    if samples < features.shortest:
        raise DataError(
            f"{place} has a recording of {samples / features.rate:.2g} s, but the model reads at least "
            f"{features.shortest / features.rate:.2g} s; drop the row"
        )
    if features.samples is not None and samples > features.samples:
        return f"more than {features.samples / features.rate:g} s"
    return f"a transcript of more than {longest} tokens" if len(answer) > longest else None


# --- rows ---------------------------------------------------------------------------------------------------------


def _rows(request: Request, data: Any) -> tuple[Records, list[Path], list[str]]:
    """Return the rows of the data, the recording of each, and its transcript."""
    if PATH.fits(data) and Path(data).is_dir():
        data = next((Path(data, name) for name in METADATA if Path(data, name).is_file()), data)
        if Path(data).is_dir():
            raise DataError(
                f"the folder '{shown(data)}' has no {METADATA[0]}; pass a table of recordings and transcripts"
            )
    records, folder = records_in(data), Path(data).parent if PATH.fits(data) else Path()
    if not records.rows:
        raise DataError(f"{records.where} has no rows; add at least one")
    own = {name: _column(records, name, request.columns.get(name)) for name in NAMES}
    unread = [name for name in records.rows[0] if name not in own.values()]
    if unread:
        log.info("columns of %s that are ignored: %s", records.where, listed(map(shown, unread), 12))
    for i, row in enumerate(records.rows):
        for name, column in own.items():
            if not isinstance(value := row.get(column), str) or not value.strip():
                what = "the path of a WAV file" if name == "audio" else "text"
                raise DataError(
                    f"{records.place(i)}: '{shown(column)}' is {described(value)}, but should be {what}; correct the "
                    "row, or drop it"
                )
    return records, [folder / row[own["audio"]] for row in records.rows], [row[own["text"]] for row in records.rows]


def _column(records: Records, name: str, given: str | None) -> str:
    """Return the column that is called ``name`` here: the ``given`` one, or the only one with a usual name."""
    columns = list(dict.fromkeys(column for row in records.rows for column in row))
    if given is not None and given not in columns:
        raise DataError(f"{records.where} has no column '{shown(given)}'{suggestion(given, columns)}")
    found = [column for column in NAMES[name] if column in columns] if given is None else [given]
    if len(found) != 1:
        what = f"both {listed(found)}" if found else f"the columns {listed(columns)}, and none of {listed(NAMES[name])}"
        raise DataError(
            f"{records.where} has {what}; name the column of {'recordings' if name == 'audio' else 'transcripts'}",
            remedy=f"pass columns={{{name!r}: …}}",
            shell=f"pass --column {name}=…",
        )
    return found[0]
