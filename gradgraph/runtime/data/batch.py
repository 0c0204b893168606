"""Validation of batches before a step runs."""

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

SPLITS = frozenset(
    {"dev", "eval", "test", "train", "val", "valid", "validation"}
)  # the keys of Hugging Face's DatasetDict
LABELS = frozenset({"class", "label", "labels", "y"})  # names for the target in other libraries

Array: TypeAlias = np.ndarray[Any, Any]
Feed: TypeAlias = Array | ort.OrtValue
Batch: TypeAlias = Mapping[str, Any] | Sequence[Any] | Any


class Known(dict[str, Array]):
    """A batch known to be valid without checks, as all batches like it have been checked.

    Attributes:
        counts: number of samples, and the denominator of a mean over the batch.
    """

    __slots__ = ("counts",)

    def __init__(self, arrays: Mapping[str, Array], counts: tuple[int, int]) -> None:
        super().__init__(arrays)
        self.counts = counts


class FromTables(dict[str, Feed]):
    """A checked batch that was given as tables.

    Attributes:
        names: names of the columns of its arrays.
    """

    __slots__ = ("names",)

    def __init__(self, arrays: Mapping[str, Feed], names: DataNames) -> None:
        super().__init__(arrays)
        self.names = names


class BatchChecker:
    """Validation and conversion of batches: names, C-contiguous arrays, dtypes, shapes, label ranges.

    Args:
        specs: the tensors of a batch, in the order of positional batches.
        finite: also check floating inputs for NaN and Inf (a pass over every batch).
        known: returns the names by which the columns of tables are matched.
    """

    def __init__(
        self, specs: Iterable[TensorSpec], finite: bool = False, known: Callable[[], DataNames] = lambda: NO_NAMES
    ) -> None:
        self.known = known
        self.some_count = True  # reject batches in which all labels are ignored
        self.specs = {s.name: s for s in specs}
        self._dtypes = {name: numpy_dtype(s.dtype) for name, s in self.specs.items()}
        self._finite = finite
        labels = [s for s in self.specs.values() if isinstance(s, TargetSpec) and s.classes is not None]
        self._classes = {s.name: s.classes or 0 for s in labels}
        targets = [s for s in self.specs.values() if isinstance(s, TargetSpec)]
        bounded = [s for s in targets if s.most is not None]
        self._bounded = sorted(bounded, key=lambda s: s.counted_by is not None)  # counts before what they count
        # with an unknown number of classes
        self._open = {s.name for s in targets if s.ignore_index is not None and s.classes is None}
        self._ignorable = [s for s in targets if s.ignore_index is not None and not s.padded]
        # an ignored label within the range may be the only label of a batch, which only a full check sees
        looked_at = finite or self._bounded or self._open
        self._quick = not looked_at and not any(s.ignore_index in range(s.classes or 0) for s in labels)
        self._noted: set[str] = set()
        self._seen: tuple[DataNames | None, bool] = (None, False)  # the known names, and whether numbers may be names
        self._usual: dict[str, _Usual] = {}  # the last batch that passed all checks
        self._usual_size = -1  # the number of arrays in that batch; -1 if there was none, or one with other values
        self._usual_counts: tuple[int, int] | None = None  # of batches that look the same, where nothing is ignored
        self._last_usual: Mapping[str, Feed] | None = None  # the last of these

    @property
    def kind(self) -> tuple[dict[str, TensorSpec], bool]:
        """The checks made here: a batch that passed one checker need not be checked by another of the same kind."""
        return self.specs, self._finite

    @property
    def fixed_rows(self) -> int | None:
        """The batch size that the step is fixed to, if any."""
        return fixed_rows(self.specs.values())

    def __call__(self, batch: Batch, raw: bool = False) -> Mapping[str, Feed]:
        """Return the checked batch by name; matching arrays are passed on without a copy.

        Args:
            batch: from a source, whose labels are class numbers.
            raw: whether it comes from the user, so integers may be class names.

        Raises:
            DataError: names, shapes, dtypes, labels or values do not match.
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
        """Return the number of samples of a checked batch, and the denominator of a mean over it: the labels that are
        not ignored, or else the samples.
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
        """Accept batches in which all labels are ignored, which contribute nothing."""
        before, self.some_count = self.some_count, False
        try:
            yield
        finally:
            self.some_count = before

    def counts_of_all(self, columns: Mapping[str, Array], rows: int) -> tuple[int, int] | None:
        """Return :meth:`counts` of every batch of ``rows`` rows of ``columns`` if no batch needs checks: the first one
        matches, and all labels are in range. None if batches must be checked one by one.
        """
        try:
            self({name: array[:rows] for name, array in columns.items()})
        except DataError:
            return None  # reported with the first batch
        labels = [(columns[n], self._classes[n]) for n, usual in self._usual.items() if usual.labels]
        fits = self._quick and all(_in_range(a.view(_UNSIGNED[a.itemsize]), classes) for a, classes in labels)
        return self._usual_counts if fits else None

    def forget(self) -> None:
        """Release all arrays."""
        self._last_usual = None
        for usual in self._usual.values():
            usual.forget()

    def _is_usual(self, batch: Batch) -> TypeGuard[dict[str, Array]]:
        """Whether this is a dict of arrays with the dtypes of the specs, the shapes of the previous batch, and labels
        in range, so that no checks are needed. It runs at every step and is kept minimal.
        """
        if not self._quick or type(batch) is not dict or len(batch) != self._usual_size:
            return False
        for name, usual in self._usual.items():  # noqa: SIM110 (a generator takes longer than what it asks)
            if not usual.fits(batch.get(name)):
                return False
        return True

    def _remember(self, checked: Mapping[str, Feed]) -> None:
        """Remember a checked batch: others like it need no further checks. Labels in range all count."""
        self._usual = {n: _Usual(v, self._classes.get(n)) for n, v in checked.items() if isinstance(v, np.ndarray)}
        self._usual_size = len(self.specs) if len(self._usual) == len(self.specs) else -1
        rows, labels = rows_of(checked), [self._usual.get(s.name) for s in self._ignorable]
        known = [usual.labels for usual in labels if usual is not None and usual.labels]
        self._usual_counts = (rows, sum(known) if known else rows) if len(known) == len(labels) else None

    def arrays_by_name(
        self, data: Batch, known: DataNames, raw: bool = True, whole: bool = True
    ) -> tuple[Mapping[str, Any], DataNames]:
        """Return :meth:`named` data with tables converted to arrays and labels to class numbers, and the names of the
        columns and classes.

        Numbers that are not ``raw`` are class numbers already; data that are not ``whole`` are a batch.

        Raises:
            DataError: names or columns do not match.
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
        """Whether integers must be matched with known classes."""
        known = self.known()
        if known is not self._seen[0]:
            found = ((Classes.known(known, name), spec) for name, spec in self.specs.items() if takes_labels(spec))
            self._seen = known, any(one.look_at_numbers(spec) for one, spec in found if one is not None)
        return self._seen[1]

    def numbered(self, batch: Batch, but: Collection[str] = ()) -> Batch:
        """Replace integers that are class names by class numbers in a user's batch, except for the targets ``but``."""
        if is_table(batch) or not self.looks_at_numbers:
            return batch
        made = dict(self.named(batch))
        for name, value in made.items():
            if name not in but and not is_table(value):
                labels = array_labels(value, self.specs[name], self.known(), whole=False)
                made[name] = value if labels is None else labels[0]
        return made

    def named(self, batch: Batch) -> Mapping[str, Any]:
        """Return ``batch`` as a mapping with exactly the expected names; positions follow the order of the specs."""
        if not isinstance(batch, Mapping):
            values = list(batch) if isinstance(batch, tuple | list) else [batch]
            if len(values) != len(self.specs):
                raise DataError(
                    f"the batch has {len(values)} entries, but the step expects {len(self.specs)} "
                    f"({', '.join(map(shown, self.specs))}); pass a dict with these names"
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
            raise DataError(f"the step has no inputs {listed(extra)}, which look like splits; pass one of them, such "
                            f"as data['{extra[-1]}'], and another one as validation")  # fmt: skip
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
        """Convert ``array`` to the dtype of ``spec`` if its values are preserved; logged once per name, except for
        booleans.
        """
        wanted = self._dtypes[spec.name]
        if array.dtype == wanted:
            return array
        if wanted.kind == "O":
            raise DataError(
                f"'{shown(spec.name)}' is text, which a Trainer cannot bind; replace the input by the numbers that "
                "the text stands for (train.onnx itself runs on text)"
            )
        if array.dtype.kind not in _CONVERTIBLE["f" if wanted.kind == "V" else wanted.kind]:
            raise DataError(
                f"'{shown(spec.name)}' is {array.dtype}, but the step expects {spec.dtype}", **for_type(spec, array)
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
            log.warning("'%s' is %s and is converted to %s", shown(spec.name), array.dtype, wanted)
        return converted

    def check_bounds(self, arrays: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> None:
        """Check that lengths and labels are within their bounds, if ``arrays`` contains both.

        Args:
            arrays: of a batch, or whole columns.
            sizes: dimensions by name; by default those of ``arrays``.
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
        """Check that labels are in range and, if requested, that floats are finite."""
        if isinstance(spec, TargetSpec) and array.dtype.kind in "iu":
            if spec.classes is not None:
                _check_labels(spec, array, self.some_count)
            elif spec.name in self._open:
                _check_bound(spec, array, None, array != spec.ignore_index)
        if self._finite and array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0]
            raise DataError(f"'{shown(spec.name)}' contains {array[tuple(where)]} {_position(where)}; clean the data")


class _Usual:
    """The usual array of a batch: dtype, shape, and labels in range.

    A buffer that is refilled is the same object, and is recognised by that.

    Attributes:
        labels: number of labels to check; 0 if it contains none.
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
        if array.dtype is not self._dtype and array.dtype != self._dtype:  # usually it is the same object
            return False
        if array is not self._array:
            if not array.flags.c_contiguous:
                return False
            self._array = array
            self._unsigned = array.view(_UNSIGNED[array.itemsize]) if self.labels else array
        return not self.labels or _in_range(self._unsigned, self._classes)


_NO_ARRAY = object()
_NO_LABELS = np.zeros(0, np.uint8)
# kinds of numbers by allowed conversions: floats, integers and booleans become floats, floats never integers
_CONVERTIBLE = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}


def batch_specs(manifest: Manifest, targets: bool = True) -> list[TensorSpec]:
    """Return the tensors of a batch: the inputs, then the targets."""
    return [*manifest.inputs, *(manifest.targets if targets else ())]


def fixed_rows(specs: Iterable[TensorSpec]) -> int | None:
    """Return the batch size that one of these tensors is fixed to, if any."""
    return next((s.shape[0] for s in specs if s.shape and isinstance(s.shape[0], int)), None)


def rows_of(batch: Mapping[str, Feed]) -> int:
    """Return the number of samples: the length of the first tensor that has an axis."""
    shapes = (tuple(v.shape()) if isinstance(v, ort.OrtValue) else v.shape for v in batch.values())
    return next((int(s[0]) for s in shapes if s), 1)


def on_host(feed: Feed) -> Array:
    return feed.numpy() if isinstance(feed, ort.OrtValue) else feed


def to_array(name: str, value: Any) -> Array:
    """Return a NumPy view of an array, a list, or anything with DLPack or ``__array__``, without a copy if possible.

    Raises:
        DataError: NumPy cannot read it, or a mask hides values; or its mapped file was truncated.
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
    """Return ``array`` with or without an axis of length 1 after its samples, as in ``spec``."""
    if array.ndim == 1 and len(spec.shape) == 2 and spec.shape[1] == 1:
        return array.reshape(-1, 1)
    return array.reshape(-1) if array.ndim == 2 and array.shape[1] == 1 and len(spec.shape) == 1 else array


def check_uncut(name: str, array: Array) -> None:
    """Raise DataError if ``array`` is mapped from a file truncated since: accessing a page behind its end would kill
    the process.
    """
    if is_cut(array):
        raise DataError(
            f"the file that '{shown(name)}' is mapped from was cut while it was read; write it again (while something "
            "reads it, to another path, and rename that)"
        )


def _check_nothing_hidden(name: str, value: Any) -> None:
    """Raise DataError for masked arrays with masked values, also in a list, and for masked tensors of PyTorch."""
    if isinstance(value, list | tuple):
        for part in value:
            _check_nothing_hidden(name, part)
    elif hasattr(value, "get_mask") or (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        raise DataError(
            f"'{shown(name)}' is a masked array whose mask hides values, but a step has no masks; fill them, as "
            "x.filled(0) does, or drop these samples"
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
    """Check that fixed dimensions agree, and that a symbol has one size throughout a batch."""
    if len(shape) != len(spec.shape):
        raise _wrong_shape(spec, shape)
    for size, dim in zip(shape, spec.shape, strict=True):
        if isinstance(dim, int) and size != dim:
            raise _wrong_shape(spec, shape)
        if isinstance(dim, str):
            other, known = symbols.setdefault(dim, (spec.name, size))
            if known != size:
                raise DataError(
                    f"'{shown(dim)}' is {known} in '{shown(other)}' but {size} in '{shown(spec.name)}'; give all "
                    "entries of a batch the same size"
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
            f"every label of '{shown(spec.name)}' is the ignored {spec.ignore_index}, so the loss is a mean over "
            "nothing; drop this batch"
        )
    check_range(spec, labels)


def check_range(spec: TargetSpec, labels: Array, first: int = 0) -> None:
    """Raise DataError for a label that is neither a class nor ignored; ``first`` is the number of the first row."""
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
            f"but labels range from 0 to {spec.classes - 1}",
            **for_label(spec, int(label) if labels.ndim == 1 else -1),
        )


def _check_bound(spec: TargetSpec, array: Array, most: int | None, counted: Array | None) -> None:
    """Raise DataError for a number below 0 or above ``most`` among those ``counted``."""
    wrong = (array < 0) if most is None else (array < 0) | (array > most)
    if counted is not None:
        wrong &= counted
    if wrong.any():
        where = np.argwhere(wrong)[0]
        wanted = "0 or above" if most is None else f"from 0 to {most}"
        raise DataError(
            f"'{shown(spec.name)}' contains {array[tuple(where)]} {_position(where)}, but its numbers must be "
            f"{wanted}; correct it"
        )


def _in_range(unsigned: Array, classes: int) -> bool:
    """Whether 0 <= label < ``classes`` for labels viewed as unsigned: negative ones become large, so that one pass
    (NumPy's fast argmax) finds both kinds.
    """
    return bool(unsigned.item(unsigned.argmax()) < classes)


def _position(where: Array, first: int = 0) -> str:
    """Return ``in row 3``, with the inner position for tensors of more axes."""
    inner = f" at {where[1:].tolist()}" if len(where) > 1 else ""
    return f"in row {first + where[0]}{inner}" if len(where) else "as its only element"
