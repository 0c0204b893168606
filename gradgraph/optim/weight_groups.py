"""Parameter groups: other optimizer arguments for weights selected by glob, no weight decay, layer-wise rates.

A recipe is a function that returns an optimizer. The decorator ``recipe`` adds the arguments ``groups``, ``no_decay``
and ``layer_decay``; globs are matched when a step is built (``GroupRules.resolve``).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict

import numpy as np
import onnx_ir as ir

from gradgraph.arguments import NAMES, NUMBER, WHOLE, Kind, Makers, as_names, bound, described, matching
from gradgraph.errors import BuildError, UnknownNameError, shown, suggestion
from gradgraph.graph.builder import Var
from gradgraph.graph.weight_layouts import layout_of, record_layouts
from gradgraph.optim.schedules import Schedule
from gradgraph.optim.transform import Context, Group, Optimizer
from gradgraph.rivals import entries

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack

P = ParamSpec("P")
NORM_AND_BIAS = "norm_and_bias"
FACTOR = "lr_factor"
START = "start"  # the first update that changes the weights of a group
OURS = (FACTOR, START)  # keys that every group accepts in addition to the arguments of its optimizer


class Grouping(TypedDict, total=False):
    """The keyword arguments that every optimizer accepts; docs/reference/optimizers.md explains them."""

    groups: Mapping[str, Mapping[str, Any] | Optimizer]
    no_decay: str | Sequence[str]
    layer_decay: float


_KINDS = {
    "groups": Kind("a dict of globs, each with a dict of arguments or an optimizer", lambda value: isinstance(
        value, Mapping) and all(isinstance(k, str) and isinstance(v, Mapping | Optimizer) for k, v in value.items())),
    "no_decay": NAMES,
    "layer_decay": NUMBER,
}  # fmt: skip


_LATER = ("amsgrad",)  # flags that manifests of older versions do not have
RECIPES: Makers[Optimizer] = Makers("optimizer", Optimizer, "gradgraph.optim", "adamw(1e-3)", entries.OPTIMIZERS)


def recipe(make: Callable[P, Optimizer]) -> Callable[P, Optimizer]:
    """Decorate a recipe: add the arguments of ``Grouping``, describe its optimizer for the manifest, register it."""
    own = inspect.signature(make)
    names = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    extra = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in _KINDS]
    signature = own.replace(parameters=[*names, *extra])

    @functools.wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> Optimizer:
        bound(make, signature, args, kwargs)
        grouping = {name: kwargs.pop(name) for name in _KINDS if name in kwargs}
        grouping = {name: value for name, value in grouping.items() if value is not None}
        made = make(*args, **kwargs)
        arguments = {p.name: p.default for p in names} | own.bind(*args, **kwargs).arguments
        base = replace(made, name=make.__name__, arguments=_described(arguments))
        if not grouping:
            return base
        for name, value in grouping.items():
            _KINDS[name].check(name, value)
        return _grouped(base, make, arguments, grouping)

    call.__signature__ = signature  # type: ignore[attr-defined]
    RECIPES.add(make.__name__, call)
    return call


def _described(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an optimizer for the manifest; arguments in ``_LATER`` only if they are set."""
    shown = {name: value for name, value in arguments.items() if value or name not in _LATER}
    return {
        name: value.describe() if isinstance(value, Schedule) else list(value) if isinstance(value, tuple) else value
        for name, value in shown.items()
    }


@dataclass(frozen=True)
class GroupRules:
    """The rules that divide trained weights into groups.

    Args:
        make: returns the optimizer for given arguments.
        arguments: its arguments for weights in no group.
        rules: for each glob, the arguments of ``make`` that differ for its weights, or another optimizer.
        no_decay: globs, or ``norm_and_bias``.
        layer_decay: the learning rate of a layer is multiplied by this once for each layer above it.
    """

    make: Callable[..., Optimizer]
    arguments: Mapping[str, Any]
    rules: Mapping[str, Mapping[str, Any] | Optimizer] = field(default_factory=dict)
    no_decay: tuple[str, ...] = ()
    layer_decay: float | None = None

    @property
    def globs(self) -> Sequence[str]:
        """The globs of the groups."""
        return list(self.rules)

    def resolve(self, graph: ir.Graph, params: Sequence[ir.Value]) -> list[Group]:
        """Return the groups of ``params``, which are initializers of ``graph``.

        Raises:
            UnknownNameError: if a glob matches no parameter.
            BuildError: if two globs conflict.
        """
        names = [p.name or "" for p in params]
        chosen = self._rules_by_weight(names)
        changeable = {name: rule for name, rule in chosen.items() if isinstance(rule, dict)}
        for name in self._without_decay(params, names) & changeable.keys():
            changeable[name]["weight_decay"] = 0.0
        if self.layer_decay is not None:
            depths = layers(graph, params)
            top = max(depths.values())
            for name, rule in changeable.items():
                rule[FACTOR] = rule.get(FACTOR, 1.0) * self.layer_decay ** (top - depths[name])
        members: dict[Any, list[int]] = {}
        for i, name in enumerate(names):
            members.setdefault(_key(chosen[name]), []).append(i)
        groups = list[Group]()
        for rows in members.values():
            name = names[rows[0]]
            start = int(changeable[name].get(START, 0)) if name in changeable else 0
            groups.append(Group(self.made(chosen[name]).transforms, tuple(rows), start))
        return groups

    def _rules_by_weight(self, names: Sequence[str]) -> dict[str, Any]:
        """Return, by weight, the optimizer of its group, or the arguments that differ from the defaults."""
        chosen: dict[str, Any] = {name: {} for name in names}
        said: dict[tuple[str, str], str] = {}  # weight and argument -> the glob that sets it
        for glob, rule in self.rules.items():
            for name in _found(glob, names, "a group of the optimizer"):
                keys = ["optimizer"] if isinstance(rule, Optimizer) else list(rule)
                for key in keys:
                    _check_said_once(name, key, glob, said)
                if isinstance(rule, Optimizer):
                    chosen[name] = rule
                else:
                    chosen[name] = {**chosen[name], **rule}
        return chosen

    def _without_decay(self, params: Sequence[ir.Value], names: Sequence[str]) -> set[str]:
        found = set[str]()
        for pattern in self.no_decay:
            if pattern == NORM_AND_BIAS:
                found.update(p.name or "" for p in params if is_norm_or_bias(p))
            else:
                found.update(_found(pattern, names, "in no_decay"))
        return found

    def made(self, overrides: Mapping[str, Any] | Optimizer) -> Optimizer:
        """Return the optimizer with ``overrides`` for some arguments, or ``overrides`` if it is an optimizer."""
        if isinstance(overrides, Optimizer):
            return overrides
        changed = {**self.arguments, **{k: v for k, v in overrides.items() if k not in OURS}}
        base, own = self.arguments["lr"], overrides.get("lr")
        if own is not None and isinstance(base, Schedule) and not isinstance(own, Schedule):
            changed["lr"] = base.scaled(own / base.peak)  # the same curve, scaled
        factor = overrides.get(FACTOR, 1.0)
        if factor != 1.0:
            lr = changed["lr"]
            changed["lr"] = lr.scaled(factor) if isinstance(lr, Schedule) else lr * factor
        return self.make(**changed)

    @property
    def base(self) -> float | Schedule:
        """The learning rate of weights in no group: the default of the input ``learning_rate``, or a schedule."""
        lr: float | Schedule = self.arguments["lr"]
        return lr


@dataclass(frozen=True)
class GroupContext:
    """The step as seen by the weights of one group.

    The group's learning rate is proportional to the input ``learning_rate``. The optimizer's step count starts with the
    group's first update, but schedules count all steps of the run.
    """

    step_context: Context
    base: float | Schedule
    start: int = 0

    def step(self) -> Var:
        done = self.step_context.step()
        return done.op.Max(done - np.int64(self.start), np.int64(0)) if self.start else done

    def scheduled(self, by: Schedule, leads: bool = True) -> Var:
        return self.step_context.scheduled(by, leads and by is self.base)

    def scalar(self, name: str, begin: float, advance: Callable[[Var], Var]) -> Var:
        return self.step_context.scalar(name, begin, advance)

    def hyperparameter(self, name: str, default: float) -> Var:
        base = self.base
        if name != "learning_rate" or isinstance(base, Schedule) or not base or default == base:
            return self.step_context.hyperparameter(name, default)
        return self.step_context.hyperparameter(name, base) * (default / base)


def is_norm_or_bias(value: ir.Value) -> bool:
    """Whether ``value`` is a scale or bias of a layer.

    These are scalars, vectors, and weights with one axis longer than 1 that are only added or multiplied element-wise.
    """
    dims = [d for d in value.shape or () if isinstance(d, int)]
    if len(dims) <= 1:
        return True
    return math.prod(dims) == max(dims) and layout_of(value).operators <= {"Add", "Mul"}


def layers(graph: ir.Graph, params: Sequence[ir.Value]) -> dict[str, int]:
    """Return the layer of each weight, counted from 0 in the order in which the model reads weights.

    If names contain numbers (``encoder.layer.3.…``), each number is a layer. Weights read before the first numbered
    layer are layer 0, weights after the last are the top layer, and those in between belong to the preceding layer.
    Otherwise each module (``fc1.…``) is a layer; if names have no modules, each matrix is a layer, together with the
    vectors after it.
    """
    record_layouts(graph)
    ordered = sorted(params, key=lambda p: layout_of(p).place)
    numbered = [re.match(r"(?:[^./]+[./])*?\d+(?=[./])", p.name or "") for p in ordered]  # encoder.layer.3
    keys = [found[0] if found else "" for found in numbered]
    if not any(keys):
        return _depths_by_module(ordered)
    last = max(i for i, key in enumerate(keys) if key)
    numbers: dict[str, int] = {}
    depths, current = {}, 0
    for i, (p, key) in enumerate(zip(ordered, keys, strict=True)):
        if key:
            current = numbers.setdefault(key, len(numbers) + 1)
        depths[p.name or ""] = current if i <= last else len(numbers) + 1
    lowest = min(depths.values())
    return {name: depth - lowest for name, depth in depths.items()}


def _depths_by_module(ordered: Sequence[ir.Value]) -> dict[str, int]:
    depths: dict[str, int] = {}
    modules: dict[str, int] = {}
    for p in ordered:
        name = p.name or ""
        module = re.sub(r"[./]?[^./]*$", "", name)
        if module:
            depths[name] = modules.setdefault(module, len(modules))
            continue
        if not modules or len(p.shape or ()) > 1:
            modules[name] = len(modules)
        depths[name] = len(modules) - 1
    return depths


def _grouped(
    base: Optimizer, make: Callable[..., Optimizer], arguments: dict[str, Any], grouping: dict[str, Any]
) -> Optimizer:
    rules = dict(grouping.get("groups", {}))
    no_decay = tuple(as_names(grouping.get("no_decay", ())))
    layer_decay = grouping.get("layer_decay")
    groups = GroupRules(make, arguments, rules, no_decay, layer_decay)
    if no_decay and "weight_decay" not in arguments:
        raise BuildError(f"{base.name} has no weight decay, so no_decay does not apply; remove it")
    if layer_decay is not None and not 0.0 < layer_decay <= 1.0:
        raise BuildError(f"layer_decay must be between 0 and 1, but is {layer_decay}")
    for glob, rule in rules.items():
        _check_rule(base.name, glob, rule, groups)
    shown_rules = {
        glob: {"name": rule.name, "arguments": dict(rule.arguments)}
        if isinstance(rule, Optimizer)
        else {k: v.describe() if isinstance(v, Schedule) else v for k, v in rule.items()}
        for glob, rule in rules.items()
    }
    said = {"groups": shown_rules, "no_decay": list(no_decay), "layer_decay": layer_decay}
    return replace(
        base, transforms=(), groups=groups, arguments={**base.arguments, **{k: v for k, v in said.items() if v}}
    )


def _check_rule(name: str, glob: str, rule: Mapping[str, Any] | Optimizer, groups: GroupRules) -> None:
    """Raise BuildError for an invalid rule when the optimizer is created, before a step is built."""
    where = f"the group '{shown(glob)}'"
    if isinstance(rule, Optimizer):
        if rule.groups is not None or rule.keeps_master or rule.after or rule.ascent:
            raise BuildError(f"the optimizer of {where} has groups or wrappers of its own; use one without them")
        return
    known = [*groups.arguments, *OURS]
    for key, value in rule.items():
        if key not in known:
            raise BuildError(f"{where} sets '{shown(key)}', which {name} does not have{suggestion(key, known)}")
        if key == START and not (WHOLE.fits(value) and value >= 0):
            raise BuildError(f"{where} has start {described(value)}; pass the number of updates before its first one, "
                             "0 or more")  # fmt: skip
        if key == FACTOR and not (NUMBER.fits(value) and 0.0 <= value < math.inf):
            raise BuildError(f"{where} has lr_factor {described(value)}; pass a number that is not negative")
    own, base = rule.get("lr"), groups.arguments["lr"]
    if own is not None and not isinstance(own, Schedule) and isinstance(base, Schedule) and not base.peak:
        raise BuildError(f"{where} sets lr to a number, but the optimizer's schedule has no lr to scale; pass a "
                         "schedule, or lr_factor")  # fmt: skip
    if own is not None and not isinstance(own, Schedule) and base == 0 and own != 0:
        raise BuildError(f"{where} cannot follow a learning rate of 0; set the optimizer's learning rate above 0")
    groups.made(rule)


def _key(rule: Any) -> Any:
    """Return a key for a rule, equal for rules with equal arguments."""
    if isinstance(rule, Optimizer):
        return id(rule)
    return tuple(sorted((k, id(v) if isinstance(v, Schedule) else repr(v)) for k, v in rule.items()))


def _found(pattern: str, names: Sequence[str], source: str) -> list[str]:
    found = matching(pattern, names)
    if not found:
        raise UnknownNameError(f"'{shown(pattern)}', {source}, matches no trained weight{suggestion(pattern, names)}")
    return found


def _check_said_once(name: str, key: str, glob: str, said: dict[tuple[str, str], str]) -> None:
    others = [g for (n, k), g in said.items() if n == name and (k == key or "optimizer" in (k, key))]
    if others:
        setting = "the optimizer" if key == "optimizer" else f"'{shown(key)}'"
        raise BuildError(
            f"the groups '{shown(others[0])}' and '{shown(glob)}' both set {setting} of '{shown(name)}'; "
            "write globs of which only one matches it"
        )
    said[name, key] = glob
