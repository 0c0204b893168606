"""Is this batch what the step expects? Checked before it runs, and said in one sentence if not."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import onnxruntime as ort

from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.files.mapped import is_cut
from gradgraph.preprocess.frames import is_table
from gradgraph.runtime.data.remedies import for_label, for_shape, for_type
from gradgraph.runtime.data.tables import array_labels, columns_in, columns_of, matrix_of
from gradgraph.step.classes import Classes, takes_labels
from gradgraph.step.data_names import NO_NAMES, DataNames
from gradgraph.step.manifest import Manifest, TargetSpec, TensorSpec, numpy_dtype

log = logging.getLogger("gradgraph")

SPLITS = frozenset({"dev", "eval", "test", "train", "val", "valid", "validation"})  # of Hugging Face's DatasetDict
LABELS = frozenset({"class", "label", "labels", "y"})  # what others call the target

Array: TypeAlias = np.ndarray[Any, Any]
Feed: TypeAlias = Array | ort.OrtValue
Batch: TypeAlias = Mapping[str, Any] | Sequence[Any] | Any


class Known(dict[str, Array]):
    """A batch that needs no checks, as all batches like it have been checked.

    Attributes:
        counts: the samples, and what a mean over it is a mean over.
    """

    __slots__ = ("counts",)

    def __init__(self, arrays: Mapping[str, Array], counts: tuple[int, int]) -> None:
        super().__init__(arrays)
        self.counts = counts


class FromTables(dict[str, Feed]):
    """A checked batch that was given as tables.

    Attributes:
        names: of the columns that its arrays are made of.
    """

    __slots__ = ("names",)

    def __init__(self, arrays: Mapping[str, Feed], names: DataNames) -> None:
        super().__init__(arrays)
        self.names = names


class BatchChecker:
    """Turns what users have into what the step takes: names, C-contiguous arrays, dtypes, shapes, label ranges.

    Args:
        specs: what a batch holds, in the order in which positional batches give it.
        finite: look for NaN and Inf in floating inputs too (a pass over every batch).
        known: gives the names by which the columns of tables are matched.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], finite: bool = False, known: Callable[[], DataNames] = lambda: NO_NAMES
    ) -> None:
        self.known = known
        self.some_count = True  # refuse a batch of which all labels are ignored
        self.specs = {s.name: s for s in specs}
        self._dtypes = {name: numpy_dtype(s.dtype) for name, s in self.specs.items()}
        self._finite = finite
        labels = [s for s in self.specs.values() if isinstance(s, TargetSpec) and s.classes is not None]
        self._classes = {s.name: s.classes or 0 for s in labels}
        targets = [s for s in self.specs.values() if isinstance(s, TargetSpec)]
        bounded = [s for s in targets if s.most is not None]
        self._bounded = sorted(bounded, key=lambda s: s.counted_by is not None)  # counts before what they count
        # of those whose number of classes is not known
        self._open = {s.name for s in targets if s.ignore_index is not None and s.classes is None}
        self._ignorable = [s for s in targets if s.ignore_index is not None and not s.padded]
        # an ignored label within the range may be all that a batch holds, and only a full check sees that
        looked_at = finite or self._bounded or self._open
        self._quick = not looked_at and not any(s.ignore_index in range(s.classes or 0) for s in labels)
        self._noted: set[str] = set()
        self._seen: tuple[DataNames | None, bool] = (None, False)  # what is known, and whether numbers may be names
        self._usual: dict[str, _Usual] = {}  # what the last batch looked like that went through all checks
        self._usual_size = -1  # how many arrays that batch had; -1 where there was none, or one with other values
        self._usual_counts: tuple[int, int] | None = None  # of batches that look the same, where nothing is ignored
        self._last_usual: Mapping[str, Feed] | None = None  # the last of these

    @property
    def kind(self) -> tuple[dict[str, TensorSpec], bool]:
        """The checks made here: a batch that one checker has passed need not see another of the same kind."""
        return self.specs, self._finite

    @property
    def fixed_rows(self) -> int | None:
        """The number of samples that a batch is fixed to, if it is."""
        return fixed_rows(self.specs.values())

    def __call__(self, batch: Batch, raw: bool = False) -> Mapping[str, Feed]:
        """The checked batch, by name; what fits already is passed on without a copy.

        Args:
            batch: of a source, whose labels are numbers of classes.
            raw: it is as somebody gave it, so whole numbers may be names of classes.

        Raises:
            DataError: names, shapes, dtypes, labels or values do not fit.
        """
        if type(batch) is Known:
            return batch
        if self._is_usual(batch) and not (raw and self.looks_at_numbers):
            self._last_usual = batch
            return batch
        named, names = self.arrays_by_name(batch, self.known(), raw, whole=False)
        symbols: dict[str, tuple[str, int]] = {}
        checked: dict[str, Feed] = {}
        for name, spec in self.specs.items():
            value = _on_device(name, named[name])
            if isinstance(value, ort.OrtValue):
                wanted = self._dtypes[name].name
                kind = f"tensor({ {'float32': 'float', 'float64': 'double'}.get(wanted, wanted) })"
                if not value.is_tensor() or value.data_type() != kind:
                    raise DataError(f"'{shown(name)}' is an OrtValue of {value.data_type()}, but the step takes "
                                    f"{spec.dtype}; make it of that type")  # fmt: skip
                _check_shape(spec, tuple(value.shape()), symbols)
                checked[name] = value
                continue
            array = self.typed(spec, as_column(spec, to_array(name, value)))
            _check_shape(spec, array.shape, symbols)
            self.check_values(spec, array)
            checked[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self.check_bounds(checked, {dim: size for dim, (_, size) in symbols.items()})
        self._remember(checked)
        return FromTables(checked, names) if names else checked

    def counts(self, checked: Mapping[str, Feed]) -> tuple[int, int]:
        """The samples of a checked batch, and what a mean over it is a mean over: labels that are not ignored, or else
        the samples.
        """
        if type(checked) is Known:
            return checked.counts
        if checked is self._last_usual and self._usual_counts is not None:
            return self._usual_counts
        rows = rows_of(checked)
        labels = [(on_host(checked[s.name]), s.ignore_index) for s in self._ignorable]
        return rows, sum(int(np.count_nonzero(a != ignored)) for a, ignored in labels) if labels else rows

    @contextlib.contextmanager
    def any_may_be_ignored(self) -> Iterator[None]:
        """Accept batches of which all labels are ignored meanwhile: they add nothing to what others come to."""
        before, self.some_count = self.some_count, False
        try:
            yield
        finally:
            self.some_count = before

    def counts_of_all(self, columns: Mapping[str, Array], rows: int) -> tuple[int, int] | None:
        """:meth:`counts` of every batch of ``rows`` rows of ``columns``, if no such batch need be checked: the first
        fits, and all labels are in range. None where the batches must be looked at, one by one.
        """
        try:
            self({name: array[:rows] for name, array in columns.items()})
        except DataError:
            return None  # to be raised by the first batch
        labels = [(columns[n], self._classes[n]) for n, usual in self._usual.items() if usual.labels]
        fits = self._quick and all(_in_range(a.view(_UNSIGNED[a.itemsize]), classes) for a, classes in labels)
        return self._usual_counts if fits else None

    def forget(self) -> None:
        """Let go of all arrays."""
        self._last_usual = None
        for usual in self._usual.values():
            usual.forget()

    def _is_usual(self, batch: Batch) -> TypeGuard[dict[str, Array]]:
        """Whether this is a dict of arrays with the dtypes of the specs, the shapes of the batch before, and labels in
        range: then there is nothing to find. Every step asks this, so it does no more than it must.
        """
        if not self._quick or type(batch) is not dict or len(batch) != self._usual_size:
            return False
        for name, usual in self._usual.items():  # noqa: SIM110 (a generator takes longer than what it asks)
            if not usual.fits(batch.get(name)):
                return False
        return True

    def _remember(self, checked: Mapping[str, Feed]) -> None:
        """Note what this batch looks like: others like it need no further checks. Labels in range all count."""
        self._usual = {n: _Usual(v, self._classes.get(n)) for n, v in checked.items() if isinstance(v, np.ndarray)}
        self._usual_size = len(self.specs) if len(self._usual) == len(self.specs) else -1
        rows, labels = rows_of(checked), [self._usual.get(s.name) for s in self._ignorable]
        known = [usual.labels for usual in labels if usual is not None and usual.labels]
        self._usual_counts = (rows, sum(known) if known else rows) if len(known) == len(labels) else None

    def arrays_by_name(
        self, data: Batch, known: DataNames, raw: bool = True, whole: bool = True
    ) -> tuple[Mapping[str, Any], DataNames]:
        """:meth:`named` data, a table among them as arrays, and labels as numbers of classes; with the names of the
        columns and classes that these are made of. Numbers that are not ``raw`` are numbers of classes
        already; data that are not ``whole`` are a batch.

        Raises:
            DataError: names or columns do not fit.
        """
        if is_table(data):
            return columns_of(data, self.specs, known, whole=whole)
        named, names = self.named(data), NO_NAMES
        for name, value in named.items():
            spec = self.specs[name]
            if not is_table(value):
                if (labels := array_labels(value, spec, known, raw, whole)) is not None:
                    named, names = {**named, name: labels[0]}, names.updated(labels[1])
                continue
            if len(spec.shape) == 2:
                array, found = matrix_of(value, name, known)
            elif len(spec.shape) == 1 and name in columns_in(value):
                arrays, found = columns_of(value, {name: spec}, known, whole=whole)
                array = arrays[name]
            else:
                continue
            named, names = {**named, name: array}, names.updated(found)
        return named, names

    @property
    def looks_at_numbers(self) -> bool:
        """Whether whole numbers must be matched with the classes that are known."""
        known = self.known()
        if known is not self._seen[0]:
            found = ((Classes.known(known, name), spec) for name, spec in self.specs.items() if takes_labels(spec))
            self._seen = known, any(one.look_at_numbers(spec) for one, spec in found if one is not None)
        return self._seen[1]

    def numbered(self, batch: Batch, but: Collection[str] = ()) -> Batch:
        """A batch as somebody gave it, with numbers of classes in place of whole numbers that are names; ``but`` of
        these targets.
        """
        if is_table(batch) or not self.looks_at_numbers:
            return batch
        made = dict(self.named(batch))
        for name, value in made.items():
            if name not in but and not is_table(value):
                labels = array_labels(value, self.specs[name], self.known(), whole=False)
                made[name] = value if labels is None else labels[0]
        return made

    def named(self, batch: Batch) -> Mapping[str, Any]:
        """``batch`` as a mapping with exactly the expected names; positions follow the order of the specs."""
        if not isinstance(batch, Mapping):
            values = list(batch) if isinstance(batch, tuple | list) else [batch]
            if len(values) != len(self.specs):
                raise DataError(
                    f"the batch has {len(values)} parts, but the step takes {len(self.specs)} "
                    f"({', '.join(map(shown, self.specs))}); give a dict with these names"
                )
            return dict(zip(self.specs, values, strict=True))
        self.check_names(batch)
        return batch

    def check_names(self, names: Iterable[str]) -> None:
        present = set(names)
        if present == self.specs.keys():
            return
        extra = sorted(map(str, present - self.specs.keys()))
        missing = [n for n in self.specs if n not in present]
        if extra and SPLITS.issuperset(extra):
            raise DataError(f"the step takes no {listed(extra)}, which look like splits; give one of them, such as "
                            f"data['{extra[-1]}'], and another one as validation")  # fmt: skip
        if len(missing) == 1 and (called := next((name for name in extra if name.lower() in LABELS), None)):
            raise DataError(
                f"the step takes no '{shown(called)}', and {listed(missing)} is missing",
                remedy=f"rename it, or build the step with target_name='{shown(called)}'",
                shell=f"rename it, or build the step with --target-name {shown(called)}",
            )
        if extra:
            raise DataError(f"the step takes no {listed(extra)}{suggestion(extra[0], missing or self.specs)}")
        missed = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise DataError(f"{missed}; the step takes {listed(self.specs)}")

    def typed(self, spec: TensorSpec, array: Array) -> Array:
        """``array`` in the dtype of ``spec``: converted where the values survive, with one note per name
        (none for booleans, which masks made for somebody else are).
        """
        wanted = self._dtypes[spec.name]
        if array.dtype == wanted:
            return array
        if wanted.kind == "O":
            raise DataError(
                f"'{shown(spec.name)}' takes text, which a Trainer cannot bind; let the model take the numbers that it "
                "stands for (train.onnx itself runs on text)"
            )
        if array.dtype.kind not in _CONVERTIBLE["f" if wanted.kind == "V" else wanted.kind]:
            raise DataError(
                f"'{shown(spec.name)}' is {array.dtype}, but the step takes {spec.dtype}", **for_type(spec, array)
            )
        with np.errstate(over="raise", invalid="ignore"):
            try:
                converted = array.astype(wanted)
            except FloatingPointError:
                raise DataError(
                    f"'{shown(spec.name)}' has values too large for {wanted.name}; scale the data"
                ) from None
        if wanted.kind in "iu" and array.dtype.kind in "iu" and not np.array_equal(converted, array):
            raise DataError(f"'{shown(spec.name)}' has values that {wanted.name} cannot hold; check the data")
        if spec.name not in self._noted and array.dtype != np.bool_:
            self._noted.add(spec.name)
            log.warning("'%s' is %s and is converted to %s", shown(spec.name), array.dtype, wanted)
        return converted

    def check_bounds(self, arrays: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
        """Check that lengths lie within what they count, and labels among classes, where ``arrays`` hold all these.

        Args:
            arrays: of a batch, or whole columns.
            sizes: of dimensions by name; those of ``arrays`` by default.
        """
        found: dict[str, int] = dict(sizes or {})
        if sizes is None and self._bounded:
            for name, spec in self.specs.items():
                found |= {str(d): n for d, n in zip(spec.shape, arrays[name].shape, strict=False) if isinstance(d, str)}
        for spec in self._bounded:
            array = arrays[spec.name]
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
                continue
            counts = arrays.get(spec.counted_by) if spec.counted_by is not None else None
            counted = None
            if isinstance(counts, np.ndarray) and array.ndim == counts.ndim + 1:
                counted = np.arange(array.shape[-1]) < counts[..., None]
            most = spec.most if isinstance(spec.most, int) else found.get(spec.most or "")
            _check_bound(spec, array, most, counted)

    def check_values(self, spec: TensorSpec, array: Array) -> None:
        """Check that labels are in range, and floats finite if that was asked for."""
        if isinstance(spec, TargetSpec) and array.dtype.kind in "iu":
            if spec.classes is not None:
                _check_labels(spec, array, self.some_count)
            elif spec.name in self._open:
                _check_bound(spec, array, None, array != spec.ignore_index)
        if self._finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            raise DataError(f"'{shown(spec.name)}' holds {array[tuple(where)]} {_position(where)}; clean the data")


class _Usual:
    """The usual array of a batch: dtype, shape, and labels in range.

    A buffer that is filled again and again comes as the same object, and is known by that.

    Attributes:
        labels: how many there are, of which each is looked at; 0 if this holds none.
    """

    __slots__ = ("_array", "_classes", "_dtype", "_shape", "_unsigned", "labels")

    def __init__(self, array: Array, classes: int | None) -> None:
        self._dtype, self._shape = array.dtype, array.shape
        self.labels = array.size if classes is not None and array.dtype.kind in "iu" else 0
        self._classes = classes or 0
        self.forget()

    def forget(self) -> None:
        self._array: object = _NO_ARRAY
        self._unsigned: Array = _NO_LABELS

    def fits(self, array: Any) -> bool:
        if type(array) is not np.ndarray or array.shape != self._shape:
            return False
        if array.dtype is not self._dtype and array.dtype != self._dtype:  # mostly it is the same object
            return False
        if array is not self._array:
            if not array.flags.c_contiguous:
                return False
            self._array = array
            self._unsigned = array.view(_UNSIGNED[array.itemsize]) if self.labels else array
        return not self.labels or _in_range(self._unsigned, self._classes)


_NO_ARRAY = object()
_NO_LABELS = np.zeros(0, np.uint8)
# kinds of numbers by what they become: floats, integers and booleans become floats, never floats integers
_CONVERTIBLE = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}


def batch_specs(manifest: Manifest, targets: bool = True) -> list[TensorSpec]:
    """The tensors of a batch: the inputs, then the targets."""
    return [*manifest.inputs, *(manifest.targets if targets else ())]


def fixed_rows(specs: Iterable[TensorSpec]) -> int | None:
    """The number of samples that one of these tensors is fixed to, if any."""
    return next((s.shape[0] for s in specs if s.shape and isinstance(s.shape[0], int)), None)


def rows_of(batch: Mapping[str, Feed]) -> int:
    """The number of samples: the length of the first tensor that has an axis."""
    shapes = (tuple(v.shape()) if isinstance(v, ort.OrtValue) else v.shape for v in batch.values())
    return next((int(s[0]) for s in shapes if s), 1)


def on_host(feed: Feed) -> Array:
    return feed.numpy() if isinstance(feed, ort.OrtValue) else feed


def to_array(name: str, value: Any) -> Array:
    """NumPy's view of an array, a list, or anything that speaks DLPack or ``__array__``: no copy where possible.

    Raises:
        DataError: NumPy cannot read it, or would read values that a mask hides; it is mapped from a file that was cut.
    """
    if type(value) is np.ndarray or isinstance(value, np.memmap):
        if value.base is not None:
            check_uncut(name, value)
        return value
    _check_nothing_hidden(name, value)
    if hasattr(value, "resolve_neg"):  # PyTorch writes some signs down for later, and DLPack does not read that note
        value = value.resolve_neg()
    try:
        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, BufferError):
        return _from_dlpack(name, value)
    if array.dtype == object:
        return _from_dlpack(name, value)
    return array


def as_column(spec: TensorSpec, array: Array) -> Array:
    """``array`` with or without an axis of length 1 behind its samples, as ``spec`` has it."""
    if array.ndim == 1 and len(spec.shape) == 2 and spec.shape[1] == 1:
        return array.reshape(-1, 1)
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 and len(spec.shape) == 1 else array


def check_uncut(name: str, array: Array) -> None:
    """Raise DataError if ``array`` is mapped from a file that has become shorter since: who touches a page behind its
    end ends the process.
    """
    if is_cut(array):
        raise DataError(
            f"the file that '{shown(name)}' is mapped from was cut while it was read; write it again (while something "
            "reads it, to another path, and rename that)"
        )


def _check_nothing_hidden(name: str, value: Any) -> None:
    """Raise DataError for masked arrays that mask something, also in a list, and for masked tensors of PyTorch."""
    if isinstance(value, list | tuple):
        for part in value:
            _check_nothing_hidden(name, part)
    elif hasattr(value, "get_mask") or (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        raise DataError(
            f"'{shown(name)}' is a masked array whose mask hides values, and a step has no masks; fill them with "
            "numbers, as x.filled(0) does, or leave these samples out"
        )


DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost


def _on_device(name: str, value: Any) -> Any:
    """A tensor that lies on a device becomes an OrtValue over its memory; everything else stays as it is."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return value
    _check_nothing_hidden(name, value)
    try:
        if value.__dlpack_device__()[0] in DLPACK_HOST:
            return value
        return ort.OrtValue.from_dlpack(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        raise DataError(
            f"'{shown(name)}' lies on a device that this onnxruntime cannot take tensors from; move it to the CPU"
        ) from None


def _from_dlpack(name: str, value: Any) -> Array:
    try:
        return np.from_dlpack(value)
    except (TypeError, AttributeError, ValueError, RuntimeError, BufferError):
        raise DataError(
            f"'{shown(name)}' is a {type(value).__name__}, which NumPy cannot read; give an array of numbers"
        ) from None


# --- single checks ------------------------------------------------------------------------------------------


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], symbols: dict[str, tuple[str, int]]) -> None:
    """Check that fixed dimensions agree, and that a symbol stands for one size throughout a batch."""
    if len(shape) != len(spec.shape):
        raise _wrong_shape(spec, shape)
    for size, dim in zip(shape, spec.shape, strict=True):
        if isinstance(dim, int) and size != dim:
            raise _wrong_shape(spec, shape)
        if isinstance(dim, str):
            other, known = symbols.setdefault(dim, (spec.name, size))
            if known != size:
                raise DataError(
                    f"'{shown(dim)}' is {known} in '{shown(other)}' but {size} in '{shown(spec.name)}'; "
                    "give all parts of a batch the same size"
                )
    if any(size == 0 and dim != 0 for size, dim in zip(shape, spec.shape, strict=True)):
        raise DataError(f"'{shown(spec.name)}' is empty (shape {list(shape)}); give at least one sample")


def _wrong_shape(spec: TensorSpec, shape: tuple[int, ...]) -> DataError:
    takes = ", ".join("any" if d is None else shown(d) for d in spec.shape)
    has = f"'{shown(spec.name)}' has shape {list(shape)}"
    return DataError(f"{has}, but the step takes [{takes}]", **for_shape(spec, shape))


_UNSIGNED = {np.dtype(f"u{size}").itemsize: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _check_labels(spec: TargetSpec, labels: Array, some_count: bool) -> None:
    assert spec.classes is not None
    if not labels.size:
        return
    first = labels.item(0)
    counts = some_count and not spec.padded and spec.ignore_index is not None
    if counts and first == spec.ignore_index and (labels == first).all():
        raise DataError(
            f"every label of '{shown(spec.name)}' is the ignored {spec.ignore_index}, so the loss would be a mean over "
            "nothing; leave this batch out"
        )
    check_range(spec, labels)


def check_range(spec: TargetSpec, labels: Array, first: int = 0) -> None:
    """Raise DataError if there is a label that is no class, nor ignored; ``first`` is the number of the first row."""
    if spec.classes is None or not labels.size or _in_range(labels.view(_UNSIGNED[labels.itemsize]), spec.classes):
        return
    wrong = (labels < 0) | (labels >= spec.classes)
    if spec.ignore_index is not None:
        wrong &= labels != spec.ignore_index
    if wrong.any():
        where = np.argwhere(wrong)[0]
        label = labels[tuple(where)]
        raise DataError(
            f"'{shown(spec.name)}' holds the label {label} {_position(where, first)}, "
            f"but labels go from 0 to {spec.classes - 1}",
            **for_label(spec, int(label) if labels.ndim == 1 else -1),
        )


def _check_bound(spec: TargetSpec, array: Array, most: int | None, counted: Array | None) -> None:
    """Raise DataError for a number below 0 or above ``most`` among those that are ``counted``."""
    wrong = (array < 0) if most is None else (array < 0) | (array > most)
    if counted is not None:
        wrong &= counted
    if wrong.any():
        where = np.argwhere(wrong)[0]
        wanted = "0 or above" if most is None else f"from 0 to {most}"
        raise DataError(
            f"'{shown(spec.name)}' holds {array[tuple(where)]} {_position(where)}, but its numbers are {wanted}; "
            "correct it"
        )


def _in_range(unsigned: Array, classes: int) -> bool:
    """Whether 0 <= label < ``classes`` for labels seen as unsigned numbers: negative ones are large then, so that one
    pass finds either kind (and argmax is NumPy's quickest).
    """
    return bool(unsigned.item(unsigned.argmax()) < classes)


def _position(where: Array, first: int = 0) -> str:
    """``in row 3``, with the inner position for tensors of more axes."""
    inner = f" at {where[1:].tolist()}" if len(where) > 1 else ""
    return f"in row {first + where[0]}{inner}" if len(where) else "as its only element"
