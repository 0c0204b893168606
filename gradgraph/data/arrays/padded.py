"""Batches of samples with different sizes: padded per batch, with masks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradgraph.arguments import WHOLE, described
from gradgraph.data.arrays.batch import Array, to_array
from gradgraph.errors import DataError, listed, shown

Number = int | float | bool


class Padded:
    """A dataset whose samples have different sizes, for ``fit``, ``evaluate`` and ``predict``.

    ::

        sentences = gg.Padded(dataset, {"ids": 0, "target": -100}, mask={"ids": "attention_mask"})
        trainer.fit(sentences, epochs=3, batch_size=16)

    Args:
        dataset: a dataset with ``len(dataset)`` samples; ``dataset[i]`` is a dict of arrays or lists.
        fill: padding values by name; arrays without one must have the same size in all samples.
        mask: masks to add, by the name of the array: with ``{"ids": "attention_mask"}``, the mask is true for the
            elements of ``ids`` along its first axis, and false for padding.
        lengths: lengths to add, by the name of the array: with ``{"ids": "lengths"}``, the int64 length of ``ids``
            along its first axis.
        multiple: pad the first axis to a multiple of this, since memory is planned anew for each size.
        longest: maximum length of the first axis, to which longer samples are truncated; no limit by default.
    """

    def __init__(
        self,
        dataset: Any,
        fill: Mapping[str, Number],
        *,
        mask: Mapping[str, str] | None = None,
        lengths: Mapping[str, str] | None = None,
        multiple: int = 1,
        longest: int | None = None,
    ) -> None:
        for name, value in (("multiple", multiple), ("longest", 1 if longest is None else longest)):
            if not WHOLE.fits(value) or value < 1:
                raise DataError(f"{name} is {described(value)}; it should be a whole number above zero")
        self.dataset, self.fill, self.mask, self.lengths = dataset, dict(fill), dict(mask or {}), dict(lengths or {})
        self.multiple, self.longest = multiple, longest

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]

    def batch(self, samples: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Array]:
        """Return one array [samples, …] for each of ``names``, padded to the largest sample."""
        made = {mask: (part, self._mask_of) for part, mask in self.mask.items()}
        made |= {lengths: (part, _lengths) for part, lengths in self.lengths.items()}
        sources = {name: made.get(name, (name, functools.partial(self._stacked, name))) for name in names}
        parts = {part: self._arrays(part, samples) for part in dict.fromkeys(part for part, _ in sources.values())}
        return {name: make(parts[part]) for name, (part, make) in sources.items()}

    def _arrays(self, name: str, samples: Sequence[Mapping[str, Any]]) -> list[Array]:
        """Return the array ``name`` of each sample, truncated to the maximum length."""
        missing = next((sample for sample in samples if not isinstance(sample, Mapping) or name not in sample), None)
        if missing is not None:
            there = f"has {listed(missing)}" if isinstance(missing, Mapping) else f"is {described(missing)}"
            raise DataError(
                f"a sample {there}, but the step expects '{shown(name)}'; return each sample as a dict with this key"
            )
        arrays = [to_array(name, sample[name]) for sample in samples]
        return [a[: self.longest] if name in self.fill and a.ndim else a for a in arrays]

    def _stacked(self, name: str, arrays: Sequence[Array]) -> Array:
        shapes = {a.shape for a in arrays}
        if len({len(shape) for shape in shapes}) > 1 or (name not in self.fill and len(shapes) > 1):
            some = sorted(shapes, key=lambda shape: (len(shape), shape))
            raise DataError(
                f"the samples of '{shown(name)}' have different shapes ({some[0]} and {some[-1]}); if only their sizes "
                f"differ, set a padding value: fill={{'{shown(name)}': 0}}"
            )
        if name not in self.fill or not arrays[0].ndim:
            return np.stack(arrays)
        fill = np.asarray(self.fill[name])
        dtype = np.result_type(*([a.dtype for a in arrays if a.size] or [fill.dtype]))  # an empty list has no dtype
        if not np.array_equal(fill.astype(dtype), fill, equal_nan=dtype.kind == "f"):
            raise DataError(
                f"'{shown(name)}' is {dtype}, which cannot represent {shown(self.fill[name])}; choose another padding "
                "value"
            )
        sizes = [max(each) for each in zip(*(a.shape for a in arrays), strict=True)]
        whole = np.full((len(arrays), self._rounded(sizes[0]), *sizes[1:]), fill, dtype)
        for row, array in zip(whole, arrays, strict=True):
            row[tuple(map(slice, array.shape))] = array
        return whole

    def _mask_of(self, arrays: Sequence[Array]) -> Array:
        lengths = _lengths(arrays)
        mask: Array = np.arange(self._rounded(int(lengths.max(initial=0)))) < lengths[:, None]
        return mask

    def _rounded(self, size: int) -> int:
        return -(-size // self.multiple) * self.multiple


def _lengths(arrays: Sequence[Array]) -> Array:
    return np.array([len(a) for a in arrays], np.int64)
