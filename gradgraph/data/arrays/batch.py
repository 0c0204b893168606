"""Validation of batches before a step runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import onnxruntime as ort

from gradgraph.data.arrays.remedies import for_label, for_shape, for_type
from gradgraph.data.preprocess.frames import Frame, array_of, is_column, is_table
from gradgraph.data.record.classes import Classes, takes_labels
from gradgraph.data.record.data_names import NO_NAMES, DataNames
from gradgraph.data.record.specs import TargetSpec, TensorSpec, numpy_dtype
from gradgraph.data.tables import array_labels, columns_of, matrix_of
from gradgraph.errors import DataError, listed, shown, suggestion
from gradgraph.files.mapped import is_cut

log = logging.getLogger("gradgraph")

# usual keys of Hugging Face's DatasetDict
SPLITS = frozenset({"dev", "eval", "test", "train", "val", "valid", "validation"})
LABELS = frozenset({"class", "label", "labels", "y"})  # usual names of the target in other libraries

Array: TypeAlias = np.ndarray[Any, Any]
Feed: TypeAlias = Array | ort.OrtValue
Batch: TypeAlias = Mapping[str, Any] | Sequence[Any] | Any


class Known(dict[str, Array]):
    """A batch of rows from columns that were checked as a whole, so the batch needs no checks.

    Attributes:
        counts: the numbers of samples and of loss terms, as returned by ``BatchChecker.counts``.
    """

    __slots__ = ("counts",)

    def __init__(self, arrays: Mapping[str, Array], counts: tuple[int, int]) -> None:
        super().__init__(arrays)
        self.counts = counts


class FromTables(dict[str, Feed]):
    """A checked batch that the user passed as one or several tables.

    Attributes:
        names: names of the table columns from which the arrays of the batch were made.
    """

    __slots__ = ("names",)

    def __init__(self, arrays: Mapping[str, Feed], names: DataNames) -> None:
        super().__init__(arrays)
        self.names = names


class BatchChecker:
    """A validator of batches: it checks names, dtypes, shapes and label ranges, and makes arrays C-contiguous.

    Args:
        specs: the tensors of a batch, in the order of positional batches.
        finite: whether to check floating-point inputs for NaN and Inf, too (one pass over every batch).
        known: returns column and class names of the training data, which must match.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], finite: bool = False, known: Callable[[], DataNames] = lambda: NO_NAMES
    ) -> None:
        self.known = known
        self.some_count = True  # whether batches in which all labels are ignored are rejected
        self.specs = {s.name: s for s in specs}
        self._dtypes = {name: numpy_dtype(s.dtype) for name, s in self.specs.items()}
        self._finite = finite
        labels = [s for s in self.specs.values() if isinstance(s, TargetSpec) and s.classes is not None]
        self._classes = {s.name: s.classes or 0 for s in labels}
        targets = [s for s in self.specs.values() if isinstance(s, TargetSpec)]
        bounded = [s for s in targets if s.most is not None]
        self._bounded = sorted(bounded, key=lambda s: s.counted_by is not None)  # lengths before the labels they count
        # targets with an unknown number of classes
        self._open = {s.name for s in targets if s.ignore_index is not None and s.classes is None}
        self._ignorable = [s for s in targets if s.ignore_index is not None and not s.padded]
        # if the ignored label is itself within the range of classes, only a full check finds batches of ignored labels
        looked_at = finite or self._bounded or self._open
        self._quick = not looked_at and not any(s.ignore_index in range(s.classes or 0) for s in labels)
        self._noted: set[str] = set()
        self._seen: tuple[DataNames | None, bool] = (None, False)  # the known names, and whether numbers may be names
        self._usual: dict[str, _Usual] = {}  # the arrays of the last batch that passed all checks
        self._usual_size = -1  # the number of arrays in that batch; -1 if not all of its values were arrays
        self._usual_counts: tuple[int, int] | None = None  # counts of batches of the same shapes without ignored labels
        self._last_usual: Mapping[str, Feed] | None = None  # the last batch that was recognized as usual

    @property
    def kind(self) -> tuple[dict[str, TensorSpec], bool]:
        """A summary of the checks: the specs, and whether floats must be finite; equal kinds need no second check."""
        return self.specs, self._finite

    @property
    def fixed_rows(self) -> int | None:
        """The step's fixed batch size; None if it is not fixed."""
        return fixed_rows(self.specs.values())

    def __call__(self, batch: Batch, raw: bool = False) -> Mapping[str, Feed]:
        """Return the checked batch by name; arrays that need no conversion are not copied.

        Args:
            raw: whether the batch comes directly from the user, so that integers may be class names. Labels in batches
                of a source are class indices.

        Raises:
            DataError: if names, shapes, dtypes, labels or values do not match the step.
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
                    raise DataError(f"'{shown(name)}' is an OrtValue of {value.data_type()}, but the step expects "
                                    f"{spec.dtype}; create it with that type")  # fmt: skip
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
        """Return the number of samples in a checked batch, and the number of loss terms, by which a mean loss divides.

        Loss terms are the labels that are not ignored, or the samples if the step has no ``ignore_index``.
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
        """Accept batches in which all labels are ignored while the context is active."""
        before, self.some_count = self.some_count, False
        try:
            yield
        finally:
            self.some_count = before

    def counts_of_all(self, columns: Mapping[str, Array], rows: int) -> tuple[int, int] | None:
        """Return the :meth:`counts` common to all batches of ``rows`` rows of ``columns``, if these batches are valid.

        Otherwise return None; batches must then be checked one by one.
        """
        try:
            self({name: array[:rows] for name, array in columns.items()})
        except DataError:
            return None  # training on the first batch raises the error
        labels = [(columns[n], self._classes[n]) for n, usual in self._usual.items() if usual.labels]
        fits = self._quick and all(_in_range(a.view(_UNSIGNED[a.itemsize]), classes) for a, classes in labels)
        return self._usual_counts if fits else None

    def forget(self) -> None:
        """Drop references to all arrays."""
        self._last_usual = None
        for usual in self._usual.values():
            usual.forget()

    def _is_usual(self, batch: Batch) -> TypeGuard[dict[str, Array]]:
        """Whether ``batch`` has the dtypes and shapes of the last fully checked batch, and all labels are in range.

        Such a batch needs no full check. This runs in every step, so it is kept minimal.
        """
        if not self._quick or type(batch) is not dict or len(batch) != self._usual_size:
            return False
        for name, usual in self._usual.items():  # noqa: SIM110 (a generator would take longer than the check)
            if not usual.fits(batch.get(name)):
                return False
        return True

    def _remember(self, checked: Mapping[str, Feed]) -> None:
        """Remember the dtypes and shapes of a fully checked batch for :meth:`_is_usual`."""
        self._usual = {n: _Usual(v, self._classes.get(n)) for n, v in checked.items() if isinstance(v, np.ndarray)}
        self._usual_size = len(self.specs) if len(self._usual) == len(self.specs) else -1
        rows, labels = rows_of(checked), [self._usual.get(s.name) for s in self._ignorable]
        known = [usual.labels for usual in labels if usual is not None and usual.labels]
        self._usual_counts = (rows, sum(known) if known else rows) if len(known) == len(labels) else None

    def arrays_by_name(
        self, data: Batch, known: DataNames, raw: bool = True, whole: bool = True
    ) -> tuple[Mapping[str, Any], DataNames]:
        """Return the data as arrays by input or target name, and the names of their columns and classes.

        Tables are converted to arrays, and labels to class indices.

        Args:
            data: the data in any form that :meth:`named` accepts, or a table.
            known: column and class names of the training data.
            raw: whether the data come directly from the user; otherwise integers are class indices already.
            whole: whether these are the whole data, not a batch.

        Raises:
            DataError: if names or columns do not match the step.
        """
        if is_table(data):
            return columns_of(data, self.specs, known, whole=whole)
        named, names = self.named(data), NO_NAMES
        for name, value in named.items():
            spec = self.specs[name]
            if is_column(value):
                value = array_of(name, value)
                named = {**named, name: value}
            if not is_table(value):
                if (labels := array_labels(value, spec, known, raw, whole)) is not None:
                    named, names = {**named, name: labels[0]}, names.updated(labels[1])
                continue
            if len(spec.shape) == 2:
                array, found = matrix_of(value, name, known)
            elif len(spec.shape) == 1 and name in Frame(value):
                arrays, found = columns_of(value, {name: spec}, known, whole=whole)
                array = arrays[name]
            else:
                continue
            named, names = {**named, name: array}, names.updated(found)
        return named, names

    @property
    def looks_at_numbers(self) -> bool:
        """Whether integer labels may be class names that must be converted to class indices."""
        known = self.known()
        if known is not self._seen[0]:
            found = ((Classes.known(known, name), spec) for name, spec in self.specs.items() if takes_labels(spec))
            self._seen = known, any(one.look_at_numbers(spec) for one, spec in found if one is not None)
        return self._seen[1]

    def numbered(self, batch: Batch, but: Collection[str] = ()) -> Batch:
        """Return a user's batch with class names replaced by class indices, except in the targets ``but``."""
        if is_table(batch) or not self.looks_at_numbers:
            return batch
        made = dict(self.named(batch))
        for name, value in made.items():
            if name not in but and not is_table(value):
                value = array_of(name, value) if is_column(value) else value
                labels = array_labels(value, self.specs[name], self.known(), whole=False)
                made[name] = value if labels is None else labels[0]
        return made

    def named(self, batch: Batch) -> Mapping[str, Any]:
        """Return ``batch`` as a dict with the names of the specs; a tuple or list has the order of the specs.

        Raises:
            DataError: if an entry is missing or unknown.
        """
        if not isinstance(batch, Mapping):
            values = list(batch) if isinstance(batch, tuple | list) else [batch]
            if len(values) != len(self.specs):
                raise DataError(
                    f"the batch has {len(values)} {'entry' if len(values) == 1 else 'entries'}, but the step expects "
                    f"{len(self.specs)} "
                    f"({', '.join(map(shown, self.specs))}); pass a dict with these names"
                )
            return dict(zip(self.specs, values, strict=True))
        self.check_names(batch)
        return batch

    def check_names(self, names: Iterable[str]) -> None:
        """Raise DataError unless ``names`` are exactly the names of the specs."""
        present = set(names)
        if present == self.specs.keys():
            return
        extra = sorted(map(str, present - self.specs.keys()))
        missing = [n for n in self.specs if n not in present]
        if extra and SPLITS.issuperset(extra):
            raise DataError(f"the data look like a dict of splits ({listed(extra)}), not of inputs; pass one split, "
                            f"such as data['{extra[-1]}'], and another one as validation")  # fmt: skip
        if len(missing) == 1 and (called := next((name for name in extra if name.lower() in LABELS), None)):
            raise DataError(
                f"the step has no input '{shown(called)}', and {listed(missing)} is missing",
                remedy=f"rename it, or build the step with target_name='{shown(called)}'",
                shell=f"rename it, or build the step with --target-name {shown(called)}",
            )
        if extra:
            raise DataError(f"the step has no input {listed(extra)}{suggestion(extra[0], missing or self.specs)}")
        missed = f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise DataError(f"{missed}; the step expects {listed(self.specs)}")

    def typed(self, spec: TensorSpec, array: Array) -> Array:
        """Convert ``array`` to the dtype of ``spec``; log this once per name, except for booleans.

        Raises:
            DataError: if the conversion would change the kind of the values, or they do not fit the dtype.
        """
        wanted = self._dtypes[spec.name]
        if array.dtype == wanted:
            return array
        if wanted.kind == "O":
            raise DataError(
                f"'{shown(spec.name)}' is text, which a Trainer does not support; replace the input with "
                "numbers that encode the text (train.onnx itself runs on text)"
            )
        if array.dtype.kind not in _CONVERTIBLE["f" if wanted.kind == "V" else wanted.kind]:
            raise DataError(
                f"'{shown(spec.name)}' has dtype {array.dtype}, but the step expects {spec.dtype}",
                **for_type(spec, array),
            )
        with np.errstate(over="raise", invalid="ignore"):
            try:
                converted = array.astype(wanted)
            except FloatingPointError:
                raise DataError(
                    f"'{shown(spec.name)}' has values too large for {wanted.name}; scale the data"
                ) from None
        if wanted.kind in "iu" and array.dtype.kind in "iu" and not np.array_equal(converted, array):
            raise DataError(f"'{shown(spec.name)}' has values that {wanted.name} cannot represent; check the data")
        if spec.name not in self._noted and array.dtype != np.bool_:
            self._noted.add(spec.name)
            log.warning("'%s' is converted from %s to %s", shown(spec.name), array.dtype, wanted)
        return converted

    def check_bounds(self, arrays: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
        """Raise DataError if a value of a target with an upper bound (``TargetSpec.most``) is out of range.

        ``arrays`` are a batch, or whole columns. ``sizes`` are by default the symbolic sizes in ``arrays``.
        """
        found: dict[str, int] = dict(sizes or {})
        if sizes is None and self._bounded:
            for name, spec in self.specs.items():
                found |= {str(d): n for d, n in zip(spec.shape, arrays[name].shape, strict=False) if isinstance(d, str)}
        for spec in self._bounded:
            array = arrays[spec.name]
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
                continue
            counts = arrays.get(spec.counted_by) if spec.counted_by is not None else None
            counted = None
            if isinstance(counts, np.ndarray) and array.ndim == counts.ndim + 1:
                counted = np.arange(array.shape[-1]) < counts[..., None]
            most = spec.most if isinstance(spec.most, int) else found.get(spec.most or "")
            _check_bound(spec, array, most, counted)

    def check_values(self, spec: TensorSpec, array: Array) -> None:
        """Raise DataError if labels are out of range or, if ``finite`` was requested, floats are not finite."""
        if isinstance(spec, TargetSpec) and array.dtype.kind in "iu":
            if spec.classes is not None:
                _check_labels(spec, array, self.some_count)
            elif spec.name in self._open:
                _check_bound(spec, array, None, array != spec.ignore_index)
        if self._finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            raise DataError(f"'{shown(spec.name)}' contains {array[tuple(where)]} {_position(where)}; clean the data")


class _Usual:
    """The dtype, shape and label range of an input in the last fully checked batch, to check later arrays quickly.

    If the caller passes the last array again, as a refilled buffer, only its labels are checked.

    Attributes:
        labels: number of labels to check; 0 if the array does not contain labels.
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
        if array.dtype is not self._dtype and array.dtype != self._dtype:  # dtypes are usually the same object
            return False
        if array is not self._array:
            if not array.flags.c_contiguous:
                return False
            self._array = array
            self._unsigned = array.view(_UNSIGNED[array.itemsize]) if self.labels else array
        return not self.labels or _in_range(self._unsigned, self._classes)


_NO_ARRAY = object()
_NO_LABELS = np.zeros(0, np.uint8)
# dtype kind → kinds that may be converted to it: integers and booleans may become floats, but floats never integers
_CONVERTIBLE = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}


def fixed_rows(specs: Iterable[TensorSpec]) -> int | None:
    """Return the fixed batch size in the specs of a batch, or None if it is not fixed."""
    return next((s.shape[0] for s in specs if s.shape and isinstance(s.shape[0], int)), None)


def rows_of(batch: Mapping[str, Feed]) -> int:
    """Return the number of samples of a batch: the length of its first array that has an axis; 1 if all are scalars."""
    shapes = (tuple(v.shape()) if isinstance(v, ort.OrtValue) else v.shape for v in batch.values())
    return next((int(s[0]) for s in shapes if s), 1)


def on_host(feed: Feed) -> Array:
    """Return an input as a NumPy array; OrtValues are copied from their device."""
    return feed.numpy() if isinstance(feed, ort.OrtValue) else feed


def to_array(name: str, value: Any) -> Array:
    """Return a NumPy view of an array, a list, or anything with DLPack or ``__array__``, without a copy if possible.

    Raises:
        DataError: if NumPy cannot convert it, a mask hides some of its values, or its mapped file was truncated.
    """
    if type(value) is np.ndarray or isinstance(value, np.memmap):
        if value.base is not None:
            check_uncut(name, value)
        return value
    _check_nothing_hidden(name, value)
    if hasattr(value, "resolve_neg"):  # PyTorch delays some negations, which DLPack does not apply
        value = value.resolve_neg()
    try:
        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, BufferError):
        return _from_dlpack(name, value)
    if array.dtype == object:
        return _from_dlpack(name, value)
    return array


def as_column(spec: TensorSpec, array: Array) -> Array:
    """Return ``array`` with a second axis of length 1 added or removed if ``spec`` requires it."""
    if array.ndim == 1 and len(spec.shape) == 2 and spec.shape[1] == 1:
        return array.reshape(-1, 1)
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 and len(spec.shape) == 1 else array


def check_uncut(name: str, array: Array) -> None:
    """Raise DataError if ``array`` is mapped from a file that has been truncated since.

    Accessing memory beyond the end of the file would kill the process.
    """
    if is_cut(array):
        raise DataError(
            f"the file that '{shown(name)}' is mapped from was truncated while it was read; write it again (to replace "
            "a file while it is read, write another one and rename it)"
        )


def _check_nothing_hidden(name: str, value: Any) -> None:
    """Raise DataError for a masked array with masked values (also in a list), or a masked tensor of PyTorch."""
    if isinstance(value, list | tuple):
        for part in value:
            _check_nothing_hidden(name, part)
    elif hasattr(value, "get_mask") or (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        raise DataError(
            f"'{shown(name)}' is a masked array with masked values, which are not supported; fill them, for "
            "example with x.filled(0), or drop these samples"
        )


DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost


def _on_device(name: str, value: Any) -> Any:
    """Return a tensor on a device as an OrtValue over its memory; everything else is returned unchanged."""
    if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack_device__"):
        return value
    _check_nothing_hidden(name, value)
    try:
        if value.__dlpack_device__()[0] in DLPACK_HOST:
            return value
        return ort.OrtValue.from_dlpack(value)
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError):
        raise DataError(
            f"'{shown(name)}' is on a device that this onnxruntime cannot read tensors from; move it to the CPU"
        ) from None


def _from_dlpack(name: str, value: Any) -> Array:
    try:
        return np.from_dlpack(value)
    except (TypeError, AttributeError, ValueError, RuntimeError, BufferError):
        raise DataError(
            f"'{shown(name)}' has the type {type(value).__name__}, which NumPy cannot convert; pass an array of numbers"
        ) from None


# --- single checks ------------------------------------------------------------------------------------------


def _check_shape(spec: TensorSpec, shape: tuple[int, ...], symbols: dict[str, tuple[str, int]]) -> None:
    """Raise DataError if a fixed dimension differs, or a symbolic dimension has several sizes in the batch.

    ``symbols`` maps each symbolic dimension to the first tensor with it and its size there, and is updated.
    """
    if len(shape) != len(spec.shape):
        raise _wrong_shape(spec, shape)
    for size, dim in zip(shape, spec.shape, strict=True):
        if isinstance(dim, int) and size != dim:
            raise _wrong_shape(spec, shape)
        if isinstance(dim, str):
            other, known = symbols.setdefault(dim, (spec.name, size))
            if known != size:
                raise DataError(
                    f"the dimension '{shown(dim)}' is {known} in '{shown(other)}' but {size} in '{shown(spec.name)}'; "
                    "it must be the same in all inputs of a batch"
                )
    if any(size == 0 and dim != 0 for size, dim in zip(shape, spec.shape, strict=True)):
        raise DataError(f"'{shown(spec.name)}' is empty (shape {list(shape)}); give at least one sample")


def _wrong_shape(spec: TensorSpec, shape: tuple[int, ...]) -> DataError:
    takes = ", ".join("any" if d is None else shown(d) for d in spec.shape)
    has = f"'{shown(spec.name)}' has shape {list(shape)}"
    return DataError(f"{has}, but the step expects [{takes}]", **for_shape(spec, shape))


_UNSIGNED = {np.dtype(f"u{size}").itemsize: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _check_labels(spec: TargetSpec, labels: Array, some_count: bool) -> None:
    assert spec.classes is not None
    if not labels.size:
        return
    first = labels.item(0)
    counts = some_count and not spec.padded and spec.ignore_index is not None
    if counts and first == spec.ignore_index and (labels == first).all():
        raise DataError(
            f"every label of '{shown(spec.name)}' is the ignored label {spec.ignore_index}, so the mean loss is "
            "undefined; drop this batch"
        )
    check_range(spec, labels)


def check_range(spec: TargetSpec, labels: Array, first: int = 0) -> None:
    """Raise DataError for a label that is neither a class index nor ignored; row numbers start at ``first``."""
    if spec.classes is None or not labels.size or _in_range(labels.view(_UNSIGNED[labels.itemsize]), spec.classes):
        return
    wrong = (labels < 0) | (labels >= spec.classes)
    if spec.ignore_index is not None:
        wrong &= labels != spec.ignore_index
    if wrong.any():
        where = np.argwhere(wrong)[0]
        label = labels[tuple(where)]
        raise DataError(
            f"'{shown(spec.name)}' contains the label {label} {_position(where, first)}, "
            f"but labels must be from 0 to {spec.classes - 1}",
            **for_label(spec, int(label) if labels.ndim == 1 else -1),
        )


def _check_bound(spec: TargetSpec, array: Array, most: int | None, counted: Array | None) -> None:
    """Raise DataError if an element of ``array`` is negative or above ``most``; ``counted`` masks elements to check."""
    wrong = (array < 0) if most is None else (array < 0) | (array > most)
    if counted is not None:
        wrong &= counted
    if wrong.any():
        where = np.argwhere(wrong)[0]
        wanted = "0 or above" if most is None else f"from 0 to {most}"
        raise DataError(
            f"'{shown(spec.name)}' contains {array[tuple(where)]} {_position(where)}, but numbers must be "
            f"{wanted}; correct the data"
        )


def _in_range(unsigned: Array, classes: int) -> bool:
    """Whether all labels are at least 0 and below ``classes``.

    Labels are viewed as unsigned integers, so negative ones are large, and one pass (NumPy's fast argmax) suffices.
    """
    return bool(unsigned.item(unsigned.argmax()) < classes)


def _position(where: Array, first: int = 0) -> str:
    """Return the text for the index ``where``, such as ``at index 3`` or, with several axes, ``at index [3, 0, 2]``.

    The index of the first row is ``first``.
    """
    if not len(where):
        return "as its only element"
    index = [first + int(where[0]), *where[1:].tolist()]
    return f"at index {index if len(index) > 1 else index[0]}"
