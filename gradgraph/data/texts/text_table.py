"""Tables of texts as training data: tokens padded per batch, with one label per text or per word."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from gradgraph.arguments import ABOVE_ZERO, FLAG, TEXT, Kind, checked, instance
from gradgraph.data.arrays.batch import LABELS, Array
from gradgraph.data.dataset import Loadable
from gradgraph.data.record.classes import Classes, labelled, takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import Specs, TargetSpec, numpy_dtype
from gradgraph.data.texts.frame_columns import FrameColumns, number_of
from gradgraph.data.texts.token_inputs import TokenInputs
from gradgraph.data.texts.tokenizer import LONGEST, Encoded, Tokenizer
from gradgraph.errors import DataError, UnmatchedError, counted, listed, shown

log = logging.getLogger("gradgraph")

TAGS = ("tags", "ner_tags")  # common names of columns with word labels
LISTS = (list, tuple, np.ndarray)


@dataclass(frozen=True)
class TextForm:
    """The columns of texts and labels in a table, and the maximum number of tokens per text; None while undecided."""

    text: str | None = None
    pair: str | None = None
    choices: tuple[str, ...] | None = None
    words: str | None = None
    label: str | None = None
    length: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """All decided fields by name, except the label column, which is stored with its target."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "label"}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def read(self) -> dict[str, Any]:
        """The decided text columns, by field (``text``, ``pair``, ``choices``, ``words``)."""
        return {name: value for name, value in self.given.items() if name != "length"}

    @property
    def columns(self) -> list[str]:
        """The names of the text columns."""
        return [name for name in (self.text, self.pair, *(self.choices or ()), self.words) if name is not None]

    def labels_words(self, target: TargetSpec) -> bool:
        """Whether each word has a label, rather than each text."""
        return self.words is not None and len(target.shape) == 2

    def like(self, known: Mapping[str, Any]) -> TextForm:
        """Return a copy with missing fields from ``known``, the fields in training; columns only if all are missing."""
        read = {} if self.read else {name: value for name, value in known.items() if name != "tokenizer"}
        return replace(self, **{**read, "length": self.length or known.get("length")})


class TextTable(Loadable):
    """A table of texts and labels as training data, created by :func:`table`.

    Attributes:
        form: the columns and the maximum length that the user passed.
        classes: the class names for integer labels that the user passed.
        multiple: batches are padded to a multiple of this number of tokens.
        one_length: whether all batches are padded to one width.
    """

    def __init__(self, columns: FrameColumns, tokenizer: Tokenizer, form: TextForm, classes: Sequence[str] | None,
                 multiple: int, one_length: bool) -> None:  # fmt: skip
        self.columns, self.tokenizer, self.form = columns, tokenizer, form
        self.classes, self.multiple, self.one_length = classes, multiple, one_length
        self._encoded: dict[str, Encoded] = {}  # keyed by columns and length
        self._lengths: Array | None = None  # of the samples, as last encoded
        self._warned = set[str]()

    def __len__(self) -> int:
        return self.columns.rows

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: self.columns[name][i] for name in self.columns.names}

    def names_for(self, specs: Specs, known: DataNames) -> DataNames:
        """Encode all texts, and return the names of classes and columns; names in ``known`` take precedence.

        Raises:
            UnmatchedError: the model lacks a class of the data, or was trained with different columns or a different
                tokenizer.
            DataError: the step requires other inputs, or a column has the wrong type.
        """
        inputs = TokenInputs.of(specs)
        form = self._form(inputs, known)
        encoded = self._tokens(inputs, form)
        read = {**form.given, "tokenizer": self.tokenizer.digest}
        _, classes = self._labels(inputs.target, form, encoded, known)
        names = DataNames(texts={inputs.ids.name: read})
        if inputs.target is None or form.label is None:
            return names
        columns = {} if form.label == inputs.target.name else {inputs.target.name: [form.label]}
        return replace(names, columns=columns).updated((classes or Classes()).of(inputs.target.name))

    def load(
        self, batches: Iterator[Sequence[int]], specs: Specs, seed: Sequence[int], known: DataNames = NO_NAMES
    ) -> Iterator[dict[str, Array]]:
        """Yield batches of texts padded to the longest of each batch."""
        inputs = TokenInputs.of(specs)
        form = self._form(inputs, known)
        encoded = self._tokens(inputs, form)
        labels, _ = self._labels(inputs.target, form, encoded, known)
        for samples in batches:
            rows = np.asarray(samples)
            padded = _Padded(encoded, self._texts_of(rows, form), self._width(inputs, form, rows), self.tokenizer)
            shape = (len(rows),) if form.choices is None else (len(rows), len(form.choices))
            tokens, types, there = (a.reshape(*shape, -1) for a in padded.of_tokens())
            batch = inputs.arrays(tokens, types, there)
            if inputs.target is not None and labels is not None:
                of_words = form.labels_words(inputs.target)
                batch[inputs.target.name] = padded.of_words(labels, inputs.target) if of_words else labels[rows]
            yield {name: batch[name] for name in specs}

    def text_of(self, i: int, known: DataNames) -> str:
        """Return the texts of a sample, or its words."""
        form = self.form.like(next(iter(known.texts.values()), {}))
        values = [self.columns[name][i] for name in form.columns if name in self.columns.names]
        return " | ".join(value if isinstance(value, str) else " ".join(map(str, value)) for value in values)

    @property
    def lengths(self) -> Array | None:
        """The number of tokens of each sample, as last encoded; None with ``one_length``."""
        return None if self.one_length else self._lengths

    @property
    def longest(self) -> tuple[int, int]:
        """The index of the longest sample and its number of tokens; (0, 0) before texts are encoded for a step."""
        lengths = np.zeros(len(self), np.int64) if self._lengths is None else self._lengths
        return int(lengths.argmax()), int(lengths.max())

    # --- words and their tags ---------------------------------------------------------------------------------

    def tagged(self, rows: Sequence[int], numbers: Array, specs: Specs, names: DataNames) -> list[list[str | None]]:
        """Return the predicted tag of each word of the samples ``rows``; None for a truncated word.

        Args:
            numbers: the class predicted for each token: [samples, tokens].
            names: column and class names of the training data.
        """
        inputs = TokenInputs.of(specs)
        form = self._form(inputs, names)
        encoded, texts = self._tokens(inputs, form), self.columns.lists(form.words or "")
        classes, found = next(iter(names.classes.values()), ()), []
        for row, of_tokens in zip(rows, numbers, strict=True):
            words = encoded.words[encoded.starts[row] : encoded.starts[row + 1]]
            own = of_tokens[-len(words) :] if self.tokenizer.pads_left else of_tokens[: len(words)]
            tags: list[str | None] = [None] * len(texts[row])
            for word, number in zip(words[words >= 0], own[words >= 0], strict=True):
                tags[word] = classes[number] if number < len(classes) else str(number)
            found.append(tags)
        return found

    def tags(self, target: TargetSpec, names: DataNames) -> list[list[str]]:
        """Return the tag names of the words of each sample."""
        column = self.label_of(target, names)
        tags = self.columns.lists(column)
        known, own = Classes.known(names, target.name), self.classes or self.columns.classes(column)
        numbers, classes = labels_of([tag for row in tags for tag in row], target, known, column, own)
        flat = iter(classes.called(numbers.tolist()))
        return [[next(flat) for _ in row] for row in tags]

    # --- parts ------------------------------------------------------------------------------------------------

    def _form(self, inputs: TokenInputs, names: DataNames) -> TextForm:
        """Return the form with all fields decided, by the user's options, the training data, or the table's columns."""
        known = names.texts.get(inputs.ids.name, {})
        if known.get("tokenizer", self.tokenizer.digest) != self.tokenizer.digest:
            raise UnmatchedError(
                "the tokenizer differs from that of training, whose tokenizer.json has the SHA-256 "
                f"{known['tokenizer']}; pass that file"
            )
        form = self.form.like(known)
        if missing := [name for name in form.columns if name not in self.columns.names]:
            raise UnmatchedError(
                f"{self.columns.where} has no column {listed(missing)}, which the model reads; its columns are "
                f"{listed(self.columns.names)}",
                remedy=f"rename its columns, or name the right ones: {next(iter(form.read))}='…'",
                shell=f"rename its columns, or name the right ones: --text {next(iter(form.read))}=COLUMN",
            )
        if inputs.target is not None:
            form = replace(form, label=self.label_of(inputs.target, names))
        if not form.read:
            form = form.like(self._found(form))
        inputs.check_choices(len(form.choices or ()))
        return replace(form, length=self._length(inputs, form))

    def label_of(self, target: TargetSpec, known: DataNames) -> str:
        """Return the label column: as passed, as in training, or else the first with a usual name for labels.

        Raises:
            DataError: the table has no such column.
        """
        names = self.columns.names
        usual = [target.name, *(name for name in names if name.lower() in LABELS), *TAGS]
        of_training = [name for name in known.columns.get(target.name, ()) if name in names]
        found = self.form.label or next((name for name in (*of_training, *usual) if name in names), None)
        if found is None:
            raise DataError(
                f"{self.columns.where} has no column with a usual name for labels, only {listed(names)}",
                remedy=f"say which: label={names[-1]!r}",
                shell=f"say which: --target {names[-1]}",
            )
        self.columns[found]  # raises DataError if the column does not exist
        return found

    def _found(self, form: TextForm) -> dict[str, str]:
        """Return the form field and the name of the only column of lists (``words``), or else of texts (``text``)."""
        others = [name for name in self.columns.names if name.lower() in LABELS or name in (form.label, *TAGS)]
        for kind, what, argument in ((LISTS, "lists", "words"), (str, "texts", "text")):
            found = self.columns.the_one(kind, what, others, argument)
            if found is not None:
                return {argument: found}
        raise DataError(f"{self.columns.where} has no column of texts, only {listed(self.columns.names)}; add one")

    def _length(self, inputs: TokenInputs, form: TextForm) -> int:
        fixed = inputs.fixed_length
        if fixed is not None and form.length is not None and form.length > fixed:
            raise DataError(
                f"texts of {form.length} tokens do not fit '{shown(inputs.ids.name)}', which has {fixed}; pass a "
                "smaller length"
            )
        return form.length or fixed or self.tokenizer.longest or LONGEST

    def _tokens(self, inputs: TokenInputs, form: TextForm) -> Encoded:
        """Return all texts encoded; the result is cached by columns and length."""
        length = form.length or LONGEST
        key = repr((form.read, length))
        if key not in self._encoded:
            texts = self._texts(form)
            self._encoded[key] = encoded = self.tokenizer.encode(texts, length, form.words is not None)
            if encoded.cut:
                log.warning("%s of %s texts of %s are longer than %s tokens; their %s are truncated",
                            f"{encoded.cut:,}", f"{len(texts):,}", self.columns.where, f"{length:,}",
                            "beginnings" if self.tokenizer.cuts_left else "ends")  # fmt: skip
        if inputs.reads_padding:
            self._warn_once(
                "the model has neither an attention mask nor lengths as input, so it treats padding as text"
            )
        self._lengths = self._encoded[key].lengths.reshape(len(self), -1).max(axis=1)
        return self._encoded[key]

    def _texts(self, form: TextForm) -> list[Any]:
        """Return the texts to encode: a text, a pair or a word list per sample, or one text per choice."""
        if form.words is not None:
            return [list(map(str, words)) for words in self.columns.lists(form.words)]
        first = None if form.text is None else self.columns.texts(form.text)
        seconds = form.choices or (() if form.pair is None else (form.pair,))
        each = [self.columns.texts(name) for name in seconds]
        if first is None:
            return [choice for choices in zip(*each, strict=True) for choice in choices]
        pairs = [(text, second) for text, *others in zip(first, *each, strict=True) for second in others]
        return pairs if each else first

    def _labels(
        self, target: TargetSpec | None, form: TextForm, encoded: Encoded, known: DataNames
    ) -> tuple[Array | None, Classes | None]:
        """Return the label of each text, or of each token, and the classes.

        The first token of a word has the word's label; all other tokens have the label that the loss ignores.
        """
        if target is None or form.label is None:
            return None, None
        classes, own = Classes.known(known, target.name), self.classes or self.columns.classes(form.label)
        if len(target.shape) == 2 and takes_labels(target) and form.words is None:
            raise DataError(
                f"the model expects a label for each token ({target}), but {self.columns.where} has no column of word "
                "lists; provide words with their labels, or use a model that labels texts"
            )
        if not form.labels_words(target) or form.words is None:
            values = self.columns.labels(form.label)
            if values and isinstance(values[0], LISTS):
                width = None if takes_labels(target) or len(target.shape) != 2 else target.shape[1]
                if isinstance(width, int):
                    names = classes.names if classes is not None and classes.names else own
                    return _several(values, target, width, form.label, names), Classes()
                raise DataError(
                    f"the column '{shown(form.label)}' has a list of labels for each text, but the model expects one "
                    f"label ({target}); use a model that labels tokens, or one label for each text"
                )
            return labels_of(values, target, classes, form.label, own)
        words, tags = self.columns.lists(form.words), self.columns.lists(form.label)
        for i, (of_words, of_tags) in enumerate(zip(words, tags, strict=True)):
            if len(of_words) != len(of_tags):
                raise DataError(
                    f"{self.columns.place(i)} has {counted(len(of_words), 'word')} "
                    f"in '{shown(form.words)}' and {counted(len(of_tags), 'label')} in '{shown(form.label)}'; provide "
                    "one label for each word"
                )
        numbers, found = labels_of([tag for row in tags for tag in row], target, classes, form.label, own)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in words])])
        of_text = np.repeat(starts[:-1], encoded.lengths)
        ignored = -100 if target.ignore_index is None else target.ignore_index
        is_first = encoded.words >= 0
        if lost := int(starts[-1] - is_first.sum()):
            self._warn_once(
                f"{lost:,} of {starts[-1]:,} words of {self.columns.where} have no token (truncated or empty), so "
                "their labels are not used"
            )
        return np.where(is_first, numbers[np.where(is_first, of_text + encoded.words, 0)], ignored), found

    def _warn_once(self, words: str) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning("%s", words)

    def _width(self, inputs: TokenInputs, form: TextForm, rows: Array) -> int:
        """Return the number of tokens to pad a batch to: the fixed length of the model's input, if any.

        Otherwise, it is the longest text of the batch (of the table for ``one_length``), rounded up to ``multiple``.
        """
        assert self._lengths is not None and form.length is not None
        if inputs.fixed_length is not None:
            return inputs.fixed_length
        longest = int((self._lengths if self.one_length else self._lengths[rows]).max())
        return max(1, longest, min(form.length, -(-longest // self.multiple) * self.multiple))

    def _texts_of(self, rows: Array, form: TextForm) -> Array:
        """Return the indices of the encoded texts of the samples ``rows``: one per sample, or one per choice."""
        each = len(form.choices) if form.choices else 1
        texts: Array = (rows[:, None] * each + np.arange(each)).ravel()
        return texts


class _Padded:
    """Texts padded to rows of ``width`` tokens; ``texts`` are their indices in ``encoded``."""

    def __init__(self, encoded: Encoded, texts: Array, width: int, tokenizer: Tokenizer) -> None:
        lengths = encoded.lengths[texts][:, None]
        places = np.arange(width)[None, :] - (width - lengths if tokenizer.pads_left else 0)
        self.there: Array = (places >= 0) & (places < lengths)
        self._sources = (encoded.starts[texts][:, None] + places)[self.there]
        self._encoded, self._pad = encoded, tokenizer.pad

    def of_tokens(self) -> tuple[Array, Array, Array]:
        """Return tokens, token types and mask: [texts, width] each."""
        return self._filled(self._encoded.ids, self._pad), self._filled(self._encoded.types, 0), self.there

    def of_words(self, labels: Array, target: TargetSpec) -> Array:
        """Return the labels of the tokens, [texts, width], with the target's ignored label for padding."""
        return self._filled(labels, -100 if target.ignore_index is None else target.ignore_index)

    def _filled(self, values: Array, fill: int) -> Array:
        made: Array = np.full(self.there.shape, fill, np.int64)
        made[self.there] = values[self._sources]
        return made


COLUMN = TEXT.or_none()
COLUMNS = Kind("a list of columns", lambda value: isinstance(value, list | tuple) and all(map(TEXT.fits, value)))
TOKENIZER = instance(str | os.PathLike | Tokenizer, "the path of a tokenizer.json, or a gradgraph.text.Tokenizer")


@checked(tokenizer=TOKENIZER, text=COLUMN, pair=COLUMN, choices=COLUMNS.or_none(), words=COLUMN, label=COLUMN,
         length=ABOVE_ZERO.or_none(), classes=COLUMNS.or_none(), multiple=ABOVE_ZERO, one_length=FLAG)  # fmt: skip
def table(
    frame: Any,
    tokenizer: str | os.PathLike[str] | Tokenizer,
    *,
    text: str | None = None,
    pair: str | None = None,
    choices: Sequence[str] | None = None,
    words: str | None = None,
    label: str | None = None,
    length: int | None = None,
    classes: Sequence[str] | None = None,
    multiple: int = 8,
    one_length: bool = False,
) -> TextTable:
    """Read texts from the columns of a table, for ``fit``, ``evaluate`` and ``predict``.

    ::

        reviews = gg.text.table("reviews.csv", "tokenizer.json", text="review", label="stars", length=128)
        trainer.fit(reviews, epochs=3, batch_size=16)

    The model's inputs are recognised by name: tokens (``input_ids``), ``attention_mask``, ``token_type_ids``,
    ``position_ids``, ``lengths``. Texts of similar lengths share a batch, padded to its longest text. The
    order depends only on the trainer's seed and the epoch, so a resumed run continues at the same text.

    Args:
        frame: the path of a table (.csv, .tsv, .jsonl, .parquet, …) or of tagged words (.conll, .bio, .iob, .iob2); a
            data frame of pandas or polars, an Arrow table, a Hugging Face dataset, or a dict of lists.
        tokenizer: the path of a ``tokenizer.json``.
        text: the column of texts; by default the only one.
        pair: the column of second texts: premise and hypothesis, question and passage.
        choices: the columns of answers to choose from; each is appended to ``text``, if given.
        words: the column of word lists, for one label per word; by default the only column of lists.
        label: the column of labels: class names, class numbers, or regression values; for ``words``, lists of them. By
            default the one named like the step's target, or ``label``.
        length: maximum number of tokens; longer texts are truncated. By default the limit of the model or tokenizer, or
            else 512.
        classes: the class names for integer labels in this table: the first for 0, and so on; or for lists of names,
            the classes of the model in order.
        multiple: pad batches to a multiple of this number of tokens, since memory is planned anew for each shape.
        one_length: pad all batches to one width, so that ``predict`` can join per-token outputs.

    Raises:
        DataError: the table or the tokenizer cannot be read, or has no such column.
    """
    if sum(given is not None for given in (pair, choices, words)) > 1 or (words is not None and text is not None):
        raise DataError("text may be combined with pair or with choices only, and words with none of them; pass "
                        "fewer columns")  # fmt: skip
    if pair is not None and text is None:
        raise DataError(
            "pair is the column of second texts, but the column of first texts is missing",
            remedy="also pass text='…'",
            shell="also pass --text text=COLUMN",
        )
    read = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
    columns = FrameColumns(frame)
    for name in (text, pair, *(choices or ()), words, label):
        if name is not None and name not in columns.names:
            columns[name]
    form = TextForm(text, pair, None if choices is None else tuple(choices), words, label, length)
    return TextTable(columns, read, form, None if classes is None else tuple(classes), multiple, one_length)


def labels_of(
    values: Sequence[Any], spec: TargetSpec, known: Classes | None, column: str, own: Sequence[str] = ()
) -> tuple[Array, Classes]:
    """Return labels as class numbers with the classes, or as regression values with empty classes.

    Args:
        values: the labels of all texts, or of all words.
        own: class names that the table itself declares for integer labels.

    Raises:
        UnmatchedError: the labels have a class that the model does not have.
        DataError: there are more classes than the model has, or regression values are not numbers.
    """
    if not takes_labels(spec):
        return _quantities(values, spec, column), Classes()
    array = np.empty(len(values), object)
    array[:] = values
    numbers, classes = labelled(array, spec, known, f"the column '{shown(column)}'", own=own)
    if numbers.dtype.kind == "f":
        odd = next(number for number in numbers.tolist() if not number.is_integer())
        raise DataError(
            f"the column '{shown(column)}' contains {odd}, which is not a class, but the model expects {spec}; use "
            "class names, or whole numbers from 0 on"
        )
    return numbers, classes


def _finite(value: Any) -> float | None:
    """Convert a cell to a number; return None if it is not a finite one."""
    number = number_of(value)
    return number if number is not None and math.isfinite(number) else None


def _several(values: Sequence[Any], spec: TargetSpec, width: int, column: str, classes: Sequence[str]) -> Array:
    """Return several labels per text as an array [texts, width]: lists of numbers, or of names among ``classes``.

    Raises:
        UnmatchedError: a name is not among ``classes``.
        DataError: a value is neither, or there are no ``classes`` for names.
    """
    named = {name for each in values if isinstance(each, LISTS) for name in each}
    if named and all(isinstance(name, str) and number_of(name) is None for name in named):
        return _of_names(values, spec, width, column, classes)
    found = np.zeros((len(values), width), numpy_dtype(spec.dtype))
    for i, each in enumerate(values):
        numbers = [_finite(value) for value in each] if isinstance(each, LISTS) else []
        if None in numbers or len(numbers) != width:
            raise DataError(
                f"the column '{shown(column)}' has {shown(each)} for a text, but the model expects {spec}; use lists "
                f"of {width} numbers (for several classes per text: 1 for each of its classes, 0 for the others)"
            )
        found[i] = numbers
    return found


def _of_names(values: Sequence[Any], spec: TargetSpec, width: int, column: str, classes: Sequence[str]) -> Array:
    if len(classes) != width:
        raise DataError(
            f"the column '{shown(column)}' has lists of names, but the model expects {spec}, and its {width} classes "
            "have no names",
            remedy=f"pass classes=[…] in the order of the model, or use lists of {width} numbers",
            shell=f"name them in id2label of the model's config.json, or use lists of {width} numbers",
        )
    places, found = {name: i for i, name in enumerate(classes)}, np.zeros((len(values), width), numpy_dtype(spec.dtype))
    for i, each in enumerate(values):
        for name in each if isinstance(each, LISTS) else [each]:
            if name not in places:
                raise UnmatchedError(
                    f"the column '{shown(column)}' has the new class '{shown(name)}'; the model has {listed(classes)}; "
                    "drop such labels, or use the class names of the model"
                )
            found[i, places[name]] = 1
    return found


def _quantities(values: Sequence[Any], spec: TargetSpec, column: str) -> Array:
    numbers = [_finite(value) for value in values]
    odd = [value for value, number in zip(values, numbers, strict=True) if number is None]
    if odd:
        raise DataError(
            f"the column '{shown(column)}' has {len(odd)} value{'s' if len(odd) > 1 else ''} of {len(values)} that are "
            f"not finite numbers, such as '{shown(odd[0])}', but the model expects {spec}; use numbers only"
        )
    found = np.array(numbers, numpy_dtype(spec.dtype))
    return found[:, None] if len(spec.shape) == 2 else found
