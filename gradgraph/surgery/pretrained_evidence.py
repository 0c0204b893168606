"""Evidence that the tensors of a model are the weights they are matched with, and not functions of them.

Exporters compute tensors from weights: they transpose and scale them, add 1, or merge a BatchNormalization. A tensor is
replaced only if the model names it as the parameter, or if it is exactly what the weights of the export become.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradgraph.errors import DataError, listed, shown
from gradgraph.surgery.operation import Array
from gradgraph.surgery.pretrained_files import CONFIG
from gradgraph.surgery.pretrained_matches import Match, Part, rounding, size_of, stored
from gradgraph.surgery.pretrained_numbers import Numbers
from gradgraph.surgery.pretrained_weights import Plan
from gradgraph.surgery.stored_weights import as_read
from gradgraph.surgery.weight_places import Place
from gradgraph.surgery.weights import first_names

_SUMS = 1e-5  # relative rounding errors of sums and products of float32 that an exporter computed


def check_evidence(plan: Plan, before: Plan | None, strict: bool) -> None:
    """Check that the model's tensors are the weights of the plan, and not computed from them.

    Args:
        plan: the plan for the new weights.
        before: the plan for the weights from which the model was exported; None if they are unknown.
        strict: raise an error for tensors without evidence; otherwise drop their matches.

    Raises:
        DataError: a tensor lacks evidence, or is not what the weights of the export become.
    """
    if before is None:
        _check_offset(plan)
        _leave_doubtful(plan, strict)
    else:
        _add_equal(plan, before)
        _check_exported(plan, before)


def _add_equal(plan: Plan, before: Plan) -> None:
    """Match weights without a tensor with the unused tensors that they are equal to, in the weights of the export.

    Constants that an exporter moved from one module to another, such as positions, have no name and no module.

    Args:
        plan: the plan for the new weights.
        before: the plan for the weights from which the model was exported; it gets the same matches.
    """
    lost = {place.value: place for place in plan.places if place.name in {*plan.missing} & {*before.missing}}
    for place in lost.values():
        keys = [key for key in before.spare if key in plan.spare and _is_equal(before, place, key)]
        if len(keys) == 1:
            for each in (plan, before):
                match = Match(place, (Part(keys[0]),), is_named=False)
                each.numbers.check_shape(match)
                each.matches.append(match)
                each.missing.remove(place.name)
                each.spare.remove(keys[0])


def _is_equal(plan: Plan, place: Place, key: str) -> bool:
    """Whether a tensor of several different numbers is what the model stores."""
    array = plan.source.tensors[key]
    if array.size != size_of(place) or bool((array == array.reshape(-1)[0]).all()):
        return False
    match = Match(place, (Part(key),))
    try:
        plan.numbers.check_shape(match)
    except DataError:
        return False
    return is_stored(plan.numbers, match)


def _is_unchanged(numbers: Numbers, match: Match) -> bool:
    """Whether the model already stores exactly the new numbers of a weight."""
    return np.array_equal(stored(match.place).reshape(-1), numbers.weight(match).reshape(-1))


def is_stored(numbers: Numbers, match: Match) -> bool:
    """Whether the model stores the weight of a match, apart from the rounding of the type in which it does."""
    old, new = (np.asarray(a, np.float64).reshape(-1) for a in (stored(match.place), numbers.weight(match)))
    if old.size != new.size:
        return False
    slack = rounding(match.place).reshape(-1) + _SUMS * _terms(numbers, match).reshape(-1)
    return bool((np.abs(old - new) <= slack).all())


def _terms(numbers: Numbers, match: Match) -> Array:
    """Return the sizes of the terms that an exporter multiplied and added for a weight; 0 if it moved numbers."""
    place = match.place
    if match.norm is not None:
        array = numbers.weight(replace(match, norm=None))
        return match.norm.terms(array, match.is_kernel, match.groups)
    is_computed = numbers.has_offset(place) or place.is_decay
    return np.abs(numbers.weight(match)) if is_computed else np.zeros(1)


def _check_offset(plan: Plan) -> None:
    """Raise DataError if normalisation weights of the model seem to be 1 + weight, and no family says so."""
    distances = np.zeros(2)
    for match in [] if plan.source.norm_offset else plan.matches:
        if match.place.is_norm and match.place.layer is None and match.norm is None:
            old, new = as_read(match.place.value), plan.numbers.weight(match)
            if old.size == new.size:
                rest = old.astype(np.float64).reshape(-1) - new.reshape(-1)
                distances += [float(rest @ rest), float((rest - 1) @ (rest - 1))]
    if distances[1] < 0.25 * distances[0]:
        raise DataError(
            f"the normalisation weights of the model seem to be 1 + those of '{shown(plan.source.where)}', but no "
            f"{CONFIG} of a family that stores them so is next to the tensors; copy {CONFIG} there"
        )


def _leave_doubtful(plan: Plan, strict: bool) -> None:
    """Raise DataError, or without ``strict`` drop the matches, if the exporter may have computed tensors of the model.

    A tensor that the model does not name as a parameter may be any function of it, however similar the numbers are.
    """
    doubtful = [m for m in plan.matches if not m.is_named and not _is_unchanged(plan.numbers, m)]
    if not doubtful:
        return
    names = list(dict.fromkeys(f"{m.place.value.name} of {m.place.module}" for m in doubtful))
    if strict or len(doubtful) == len(plan.matches):
        raise DataError(
            f"the exporter may have computed weights of the model ({first_names(names)}): nothing in it says that they "
            f"are those of '{shown(plan.source.where)}', rather than a multiple or function of them",
            remedy="pass the weights from which the model was exported as exported_from, or export the new weights",
            shell="add --exported-from FILE with the weights from which the model was exported, or export the new "
            "weights",
        )
    plan.drop(doubtful)


def _check_exported(plan: Plan, before: Plan) -> None:
    """Raise DataError unless the model stores what the weights from which it was exported would become."""
    old = {(match.place.value, match.place.node): match for match in before.matches}
    for match in plan.matches:
        other = old.get((match.place.value, match.place.node))
        stored_as = f"'{shown(match.place.value.name)}' of '{shown(match.place.module)}' in the model"
        if other is None or not _has_same_tensors(plan, match, other):
            keys = [listed(m.keys, 3) if m is not None else "" for m in (match, other)]
            raise DataError(
                f"{stored_as} is {keys[0] or 'nothing'} in '{shown(plan.source.where)}', but {keys[1] or 'nothing'} in "
                f"'{shown(before.source.where)}'; pass both with the same names"
            )
        if not is_stored(before.numbers, other):
            raise DataError(
                f"{stored_as} is not what '{shown(before.source.where)}' contains, so the exporter computed it, or "
                "other weights were exported; export the new weights"
            )
        if not (match.is_named or match.norm or _is_unchanged(plan.numbers, match)) and _hides(before.numbers, other):
            raise DataError(
                f"it is unknown whether the exporter computed '{shown(match.place.value.name)}' of "
                f"'{shown(match.place.module)}': all its numbers in '{shown(before.source.where)}' are equal, 0 or 1, "
                "or it is a symmetric matrix, so a function of it may have the same numbers; export the new weights"
            )


def _has_same_tensors(plan: Plan, match: Match, other: Match) -> bool:
    """Whether a weight has the tensors of the same names before and now, or one that is equal now: a tied weight."""
    if (match.norm is None) != (other.norm is None):
        return False
    if match.parts == other.parts:
        return True
    parts = [*match.parts, *other.parts]
    tensors = [plan.source.tensors[part.key] for part in parts if part.key in plan.source.tensors and part.end is None]
    return len(parts) == len(tensors) == 2 and np.array_equal(tensors[0], tensors[1])


def _hides(numbers: Numbers, match: Match) -> bool:
    """Whether functions of a weight may be equal to it: all its numbers are equal, 0 or ±1, or it is symmetric."""
    array = numbers.weight(match)
    is_symmetric = array.ndim == 2 and array.shape[0] == array.shape[1] and np.array_equal(array, array.T)
    is_one_number = array.size > 1 and bool((array == array.reshape(-1)[0]).all())
    return is_symmetric or is_one_number or bool(np.isin(np.abs(array), (0, 1)).all())
