"""The inputs of a model on texts: token ids, mask, token types, positions or lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gradgraph.data.arrays.batch import Array
from gradgraph.data.record.specs import TargetSpec, TensorSpec, numpy_dtype
from gradgraph.errors import DataError, counted, shown

_ROLES = {"mask": "mask", "type": "types", "segment": "types", "position": "positions", "length": "lengths"}


def role_of(name: str) -> str:
    """Return the role that an input's name implies, such as ``mask`` for ``attention_mask``; by default ``ids``."""
    return next((role for word, role in _ROLES.items() if word in name.lower()), "ids")


@dataclass(frozen=True)
class TokenInputs:
    """The inputs and the target of a step on texts.

    Attributes:
        ids: the input for token ids: [texts, tokens], or [texts, choices, tokens].
        inputs: all inputs, with their roles.
        target: the only target, if there is one.
    """

    ids: TensorSpec
    inputs: Mapping[str, tuple[TensorSpec, str]]
    target: TargetSpec | None

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> TokenInputs:
        """Return a step's inputs and target with their roles; raise DataError if a table of texts cannot feed them."""
        targets = [spec for spec in specs.values() if isinstance(spec, TargetSpec)]
        inputs = {name: (spec, role_of(name)) for name, spec in specs.items() if spec not in targets}
        ids = [spec for spec, role in inputs.values() if role == "ids"]
        fitting = [spec for spec in ids if len(spec.shape) in (2, 3) and numpy_dtype(spec.dtype).kind in "iu"]
        if len(ids) != 1 or not fitting or len(targets) > 1:
            raise DataError(
                f"a table of texts provides token ids, a mask, token types, positions, lengths and one target, but the "
                f"step expects {', '.join(map(str, specs.values()))}; name the inputs as transformers do (input_ids, "
                "attention_mask, token_type_ids), or pass arrays"
            )
        return cls(ids[0], inputs, targets[0] if targets else None)

    @property
    def has_choices(self) -> bool:
        return len(self.ids.shape) == 3

    @property
    def fixed_length(self) -> int | None:
        """The number of tokens of the model's input; None if it is not fixed."""
        size = self.ids.shape[-1]
        return size if isinstance(size, int) else None

    @property
    def reads_padding(self) -> bool:
        """Whether the model cannot distinguish padding from text: it has no input for a mask or for lengths."""
        return not any(role in ("mask", "lengths") for _, role in self.inputs.values())

    def arrays(self, tokens: Array, types: Array, there: Array) -> dict[str, Array]:
        """Return each input for a batch of padded texts: [texts, width], or [texts, choices, width].

        ``there`` is False for padding.
        """
        made = {
            "ids": tokens,
            "types": types,
            "mask": there,
            "positions": np.maximum(np.cumsum(there, axis=-1) - 1, 0),
            "lengths": there.sum(axis=-1),
        }
        return {name: made[role].astype(numpy_dtype(spec.dtype)) for name, (spec, role) in self.inputs.items()}

    def check_choices(self, count: int) -> None:
        """Raise DataError unless the model expects ``count`` choices per sample; 0 for a single text instead."""
        wanted = self.ids.shape[1] if self.has_choices else 0
        if self.has_choices and not count:
            raise DataError(
                f"'{shown(self.ids.name)}' expects several choices for each text",
                remedy="name their columns: choices=['ending0', 'ending1']",
                shell='name their columns: --text \'choices=["ending0","ending1"]\'',
            )
        if count and (not self.has_choices or (isinstance(wanted, int) and wanted != count)):
            expected = f"{wanted} choices" if self.has_choices else "one text"
            raise DataError(
                f"choices names {counted(count, 'column')}, but '{shown(self.ids.name)}' expects {expected} per "
                "sample; name as many columns"
            )
