"""Recordings and their transcripts, as spectrograms and tokens in batches for an encoder with a decoder (Whisper)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradgraph.arguments import PATH, described
from gradgraph.chat.task_request import Request
from gradgraph.chat.text_pairs import Pairs, check_tokens, start_of
from gradgraph.data.arrays.batch import Array
from gradgraph.data.prefetch import prefetched_samples
from gradgraph.data.record.specs import TensorSpec, numpy_dtype
from gradgraph.data.sounds import MOST_SAMPLES, length_at, opened_sound, read_sound
from gradgraph.data.texts.records import Records, records_in
from gradgraph.data.texts.tokenizer_files import table_in
from gradgraph.errors import ArgumentError, DataError, listed, shown, suggestion
from gradgraph.files.atomic import write_atomically
from gradgraph.files.digest import digest_of
from gradgraph.files.mapped import pieces_of
from gradgraph.files.models import load_model
from gradgraph.files.untrusted.regular import open_regular
from gradgraph.graph.shape_inference import shape_of
from gradgraph.sound.whisper_features import HIGHEST, WhisperFeatures

log = logging.getLogger("gradgraph.chat")

# usual names of the columns, of which the data may have one for each
NAMES = {"audio": ("audio", "file_name", "file", "path"), "text": ("text", "sentence", "transcription", "transcript")}
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # in a folder of Hugging Face's audiofolder
EXTRACTOR, PROCESSOR, GENERATION = "preprocessor_config.json", "processor_config.json", "generation_config.json"
KIND = "WhisperFeatureExtractor"
POSITIONS, LONGEST = "max_target_positions", 448
MULTILINGUAL = 51865  # minimum vocabulary size of OpenAI's multilingual models
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


class Recordings(Pairs):
    """WAV files as spectrograms, and their transcripts as tokens; see :class:`Pairs`.

    Args:
        files: the WAV files.
        features: computes the spectrograms.
        answers, start, pad, most: as for :class:`Pairs`.
    """

    provides = "spectrograms"

    def __init__(
        self,
        files: Sequence[Path],
        features: WhisperFeatures,
        answers: Sequence[Sequence[int]],
        start: int,
        pad: int,
        most: int,
    ) -> None:
        super().__init__(answers, start, pad, most)
        self.files, self.features = files, features

    def __getitem__(self, i: int) -> Array:
        """Return the spectrogram of recording ``i``: float32 [mels, frames]."""
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
            yield [i for i, _ in rows], {"read": np.stack([features for _, features in rows])}

    def _fits(self, spec: TensorSpec) -> bool:
        return numpy_dtype(spec.dtype).kind == "f" and len(spec.shape) == 3


def _digest(file: Path) -> str:
    with open_regular(file) as content:
        return digest_of(pieces_of(content))


def read_recordings(request: Request, data: Any) -> Recordings:
    """Read a table of WAV files and transcripts, or a folder with one in ``metadata.csv``, as Hugging Face reads them.

    Paths are relative to the table. The tokens of a transcript are those of transformers: language, task, no
    timestamps, the text, end of text.

    Raises:
        DataError: the data lack a column; a row has no recording or transcript, or is too long for the model; or the
            folder has another feature extractor.
        ArgumentError: the language is unknown, or the model has none.
    """
    recipe, tokenizer = request.recipe, request.tokenizer
    if recipe.long == "cut":
        raise ArgumentError(
            f"the task {recipe.task} does not cut recordings, whose transcripts would no longer match",
            remedy="pass long='drop', or split long recordings",
            shell="pass --long drop, or split long recordings",
        )
    features, prompt, longest = features_of(request), prompt_of(request).tokens, request.longest(LONGEST, POSITIONS)
    records, files, texts = _rows(request, data)
    end = [_number(request, "<|endoftext|>")]
    answers = [[*prompt, *ids, *end] for ids in tokenizer.ids(texts, False)]
    seconds = features.samples / features.rate
    kept, resampled = list[int](), set[int]()
    for i, (file, answer) in enumerate(zip(files, answers, strict=True)):
        opened = opened_sound(file)
        check_tokens([answer], records.place(i), request.base.vocabulary)
        is_long = length_at(features.rate, opened) > features.samples
        if (is_long or len(answer) > longest) and recipe.long == "error":
            what = f"more than {seconds:g} s" if is_long else f"a transcript of more than {longest} tokens"
            raise DataError(
                f"{records.place(i)} has {what}, which the model does not read",
                remedy="split the recording, or pass long='drop'",
                shell="split the recording, or pass --long drop",
            )
        if is_long or len(answer) > longest:
            continue
        kept.append(i)
        if opened.rate != features.rate and opened.rate not in resampled:
            read_sound(file, features.rate)  # raises before training if the package that resamples is missing
            resampled.add(opened.rate)
    if len(kept) < len(files):
        log.warning("%d rows of %s are too long; they are dropped", len(files) - len(kept), records.where)
    if not kept:
        raise DataError(f"no row of {records.where} remains; add shorter recordings")
    return Recordings([files[i] for i in kept], features, [answers[i] for i in kept], start_of(request), tokenizer.pad,
                      longest)  # fmt: skip


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


# --- the folder ---------------------------------------------------------------------------------------------------


def features_of(request: Request) -> WhisperFeatures:
    """Return the feature extractor of a folder.

    Raises:
        DataError: the folder has none of Whisper, or its encoder expects other spectrograms.
    """
    folder = request.base.path
    name, found = EXTRACTOR, table_in(folder, EXTRACTOR)
    if not found:  # transformers 5 writes one file for tokenizer and feature extractor
        name, found = PROCESSOR, table_in(folder, PROCESSOR).get("feature_extractor") or {}
    kind = found.get("feature_extractor_type") if isinstance(found, Mapping) else None
    if kind != KIND:
        what = f"the feature extractor {shown(kind)}" if isinstance(kind, str) else f"no {EXTRACTOR}"
        raise DataError(f"the folder '{shown(folder)}' has {what}, but {request.recipe.task} requires {KIND}")

    def whole(key: str, usual: int) -> int:
        value = found.get(key, usual)
        if type(value) is not int or not 0 < value <= MOST_SAMPLES:
            raise DataError(f"'{key}' in '{shown(folder / name)}' is {described(value)}, but should be a whole number "
                            "above zero; download the file again")  # fmt: skip
        return value

    unusual = next((key for key, usual in (("dither", 0.0), ("padding_side", "right"), ("padding_value", 0.0))
                    if found.get(key, usual) != usual), None)  # fmt: skip
    rate, hop = whole("sampling_rate", 16000), whole("hop_length", 160)
    samples, n_fft, mels = whole("chunk_length", 30) * rate, whole("n_fft", 400), whole("feature_size", 80)
    fits = hop <= samples and n_fft < samples <= MOST_SAMPLES and samples // hop * n_fft <= MOST_SAMPLES
    if unusual is not None or rate < 2 * HIGHEST or not fits:
        key = unusual or ("sampling_rate" if rate < 2 * HIGHEST else "n_fft")
        raise DataError(f"'{key}' in '{shown(folder / name)}' is {described(found.get(key))}, which is not supported; "
                        "use the file of the model")  # fmt: skip
    made = WhisperFeatures(rate, samples, n_fft, hop, mels)
    read = next((shape for v in load_model(request.base.encoder()).graph.inputs
                 if (shape := shape_of(v)) is not None and len(shape) == 3), (None, None, None))  # fmt: skip
    if any(isinstance(size, int) and size != own for size, own in zip(read[1:], (mels, made.frames), strict=True)):
        raise DataError(
            f"the encoder reads spectrograms of {read[1]} × {read[2]}, but '{shown(folder / name)}' describes {mels} × "
            f"{made.frames}; use the file of the model"
        )
    return made


@dataclass(frozen=True)
class Prompt:
    """The tokens between the start token and a transcript, and what they say; None for an English-only model."""

    tokens: Sequence[int]
    language: str | None = None
    task: str | None = None


def prompt_of(request: Request) -> Prompt:
    """Return the prompt of a model, as transformers' tokenizer adds it to transcripts.

    The language is that of the recipe, of ``generation_config.json``, or of the tokenizer.

    Raises:
        ArgumentError: no language is given, or an unknown one; or the model knows only one.
    """
    recipe, generation = request.recipe, table_in(request.base.path, GENERATION)
    plain, stated = _number(request, "<|notimestamps|>"), generation.get("is_multilingual")
    if not (stated if isinstance(stated, bool) else (request.base.vocabulary or 0) >= MULTILINGUAL):
        if recipe.language is not None or recipe.translate:
            raise ArgumentError(
                "the model is English-only, and has no languages to choose or to translate",
                remedy="omit language and translate",
                shell="omit --language and --translate",
            )
        return Prompt([plain])
    languages = {match[1]: n for token, n in request.tokenizer.words.items() if (match := _LANGUAGE.fullmatch(token))}
    language = recipe.language or _usual_language(request, generation, languages)
    if language is None:
        raise ArgumentError(
            "the model is multilingual, and no language is given",
            remedy="pass the language of the transcripts: language='en'",
            shell="pass the language of the transcripts, such as --language en",
        )
    if language not in languages:
        raise ArgumentError(
            f"the model has no language '{shown(language)}'{suggestion(language, languages)}; pass a code such as 'en'"
        )
    task = "translate" if recipe.translate else "transcribe"
    return Prompt([languages[language], _number(request, f"<|{task}|>"), plain], language, task)


def _usual_language(request: Request, generation: Mapping[str, Any], languages: Mapping[str, int]) -> str | None:
    """Return the language that a folder was fine-tuned for; None if it was not."""
    if isinstance(named := generation.get("language"), str):
        return named.strip("<|>")
    forced = generation.get("forced_decoder_ids") or request.base.described.get("forced_decoder_ids") or ()
    numbers = [pair[1] for pair in forced if isinstance(pair, list) and len(pair) == 2]
    numbers += next(request.tokenizer.ids([""], True))  # what it adds to each text
    codes = {number: code for code, number in languages.items()}
    return next((codes[number] for number in numbers if isinstance(number, int) and number in codes), None)


def _number(request: Request, token: str) -> int:
    number = request.tokenizer.number_of(token)
    if number is None:
        raise DataError(
            f"the tokenizer of '{shown(request.base.path)}' has no token '{token}'; use the tokenizer.json of Whisper"
        )
    return number


def write_prompt(request: Request) -> None:
    """Write language and task to the generation options of a tuned multilingual model, as transformers' recipe does."""
    prompt, file = prompt_of(request), request.out / GENERATION
    if prompt.language is not None and file.is_file():
        kept = {key: value for key, value in table_in(request.out, GENERATION).items() if key != "forced_decoder_ids"}
        changed = {**kept, "language": prompt.language, "task": prompt.task}
        write_atomically(file, json.dumps(changed, indent=2).encode())
