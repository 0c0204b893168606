"""Modules: networks as objects that contain parameters, buffers and other modules, as in ``torch.nn``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from gradgraph.errors import ModelError, UnknownNameError
from gradgraph.frontend.tensor import Size, TensorMethods
from gradgraph.frontend.trace import as_dtype, current
from gradgraph.graph.builder import Var

__all__ = ["Buffer", "Module", "ModuleDict", "ModuleList", "Parameter", "ParameterList", "Sequential"]

M = TypeVar("M", bound="Module")
N = TypeVar("N", bound="_Numbered")


class Stored(TensorMethods):
    """An array of a module, which can be used as a traced tensor inside ``forward``.

    Args:
        data: the values: a PyTorch tensor, or any argument of ``numpy.asarray``.
        dtype: the element type; by default that of ``data``, or float32 for float64.
    """

    role = ""

    def __init__(self, data: Any, dtype: Any = None) -> None:
        array = as_array(data)
        if dtype is not None:
            array = array.astype(as_dtype(dtype).numpy())
        elif array.dtype == np.float64:
            array = array.astype(np.float32)
        self.data = np.array(array)

    @property
    def traced(self) -> Var:
        return current().stored(self, self.data, self.role)

    @property
    def shape(self) -> Size:
        return Size(self.data.shape)

    def numpy(self) -> np.ndarray:
        """Return the array, without copying."""
        return self.data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data.dtype}{list(self.data.shape)})"


class Parameter(Stored):
    """A trained array. In the exported model it is an initializer named after its path, such as ``layer1.0.weight``."""

    role = "parameter"


class Buffer(Stored):
    """An array that belongs to the model but is not trained, such as a running mean."""

    role = "buffer"

    def __init__(self, data: Any, dtype: Any = None, persistent: bool = True) -> None:
        super().__init__(data, dtype)
        self.persistent = persistent


def as_array(data: Any) -> np.ndarray:
    """Convert an array, a list, a number or a PyTorch tensor to a NumPy array."""
    if isinstance(data, Stored):
        return data.data
    if hasattr(data, "detach"):
        data = data.detach().cpu()
        data = data.float() if str(data.dtype) == "torch.bfloat16" else data
        return np.asarray(data.numpy())
    return np.asarray(data)


class Module:
    """Base class of networks and layers.

    In a subclass, assign parameters, buffers and modules to attributes in ``__init__``, after ``super().__init__()``,
    and write the computation in ``forward``. Modules can be called only while ``gradgraph.frontend.export`` traces
    them.
    """

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Buffer | None]
    _modules: dict[str, Module | None]

    def __init__(self) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            object.__setattr__(self, name, {})
        object.__setattr__(self, "training", True)

    # the arguments of forward depend on the network
    forward: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        forward = getattr(self, "forward", None)
        if forward is None:
            raise ModelError(f"{type(self).__name__} has no forward; define forward(self, ...)")
        path = trace.modules.get(id(self))
        outer = trace.builder.scope
        with trace.scope(path if path is not None else "/".join(filter(None, (outer, type(self).__name__)))):
            return forward(*args, **kwargs)

    # --- attributes ---

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = {"_parameters": Parameter, "_buffers": Buffer, "_modules": Module}
        kind = next((table for table, cls in kinds.items() if isinstance(value, cls)), None)
        if kind is not None and "_modules" not in self.__dict__:
            raise ModelError(f"{type(self).__name__}.__init__ must call super().__init__() before it assigns '{name}'")
        tables: dict[str, dict[str, Any]] = {k: self.__dict__.get(k, {}) for k in kinds}
        if kind is None and value is not None and name in tables["_buffers"]:
            before = tables["_buffers"][name]
            value, kind = Buffer(value, persistent=before is None or before.persistent), "_buffers"
        holder = kind or next((k for k, table in tables.items() if name in table), None)
        if holder is None or (kind is None and value is not None):
            _forget(tables, name)
            object.__setattr__(self, name, value)
            return
        _forget({k: t for k, t in tables.items() if k != holder}, name)
        self.__dict__.pop(name, None)
        tables[holder][name] = value

    def __getattr__(self, name: str) -> Any:
        for table in ("_parameters", "_buffers", "_modules"):
            held = self.__dict__.get(table, {})
            if name in held:
                return held[name]
        raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")

    def __delattr__(self, name: str) -> None:
        if not _forget({k: self.__dict__[k] for k in ("_parameters", "_buffers", "_modules")}, name):
            object.__delattr__(self, name)

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Register a parameter under a name that need not be an identifier; ``None`` reserves the name."""
        self._parameters[name] = parameter

    def register_buffer(self, name: str, data: Any, persistent: bool = True) -> None:
        """Register an array that is not trained; ``None`` reserves the name."""
        self._buffers[name] = None if data is None else Buffer(data, persistent=persistent)

    def register_module(self, name: str, module: Module | None) -> None:
        """Register a submodule under a name; ``None`` reserves the name."""
        self._modules[name] = module

    add_module = register_module

    # --- walking ---

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield direct submodules with their names."""
        return ((name, m) for name, m in self._modules.items() if m is not None)

    def children(self) -> Iterator[Module]:
        """Yield direct submodules."""
        return (m for _, m in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module itself and all submodules with their paths, each object once."""
        seen: set[int] = set()
        for path, module in self._walk(prefix):
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module

    def modules(self) -> Iterator[Module]:
        """Yield the module itself and all submodules, each once."""
        return (m for _, m in self.named_modules())

    def _walk(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield the module itself and all submodules with their paths; a shared module is yielded once per path."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child._walk(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Yield parameters with their paths. A shared parameter is yielded once, under its first path."""
        return _distinct(self._stored("_parameters", prefix), remove_duplicate)

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of this module and all submodules, each once."""
        return (p for _, p in self.named_parameters())

    def named_buffers(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, Buffer]]:
        """Yield buffers with their paths. A shared buffer is yielded once, under its first path."""
        return _distinct(self._stored("_buffers", prefix), remove_duplicate)

    def buffers(self) -> Iterator[Buffer]:
        """Yield the buffers of this module and all submodules, each once."""
        return (b for _, b in self.named_buffers())

    def _stored(self, table: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
        for path, module in self._walk(prefix):
            for name, held in getattr(module, table).items():
                if held is not None:
                    yield (f"{path}.{name}" if path else name), held

    def get_submodule(self, target: str) -> Module:
        """Return the module at a path such as ``"layer1.0"``."""
        for path, module in self._walk():
            if path == target:
                return module
        raise UnknownNameError(f"{type(self).__name__} has no module '{target}'; named_modules() lists them")

    def apply(self: M, fn: Callable[[Module], Any]) -> M:
        """Call ``fn`` on all submodules and on this module, for example for custom initialisation."""
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    # --- state ---

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of all parameters and persistent buffers, under PyTorch's names."""
        return {name: held.data.copy() for name, held in self._state().items()}

    def _state(self) -> dict[str, Stored]:
        state: dict[str, Stored] = {}
        for path, module in self._walk():
            kept = {n: b for n, b in module._buffers.items() if b is not None and b.persistent}
            for name, held in {**module._parameters, **kept}.items():
                if held is not None:
                    state[f"{path}.{name}" if path else name] = held
        return state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load arrays or PyTorch tensors by name. If this raises, nothing has been loaded.

        PyTorch's ``num_batches_tracked`` is ignored.

        Args:
            state: the arrays by name.
            strict: whether names must match exactly; otherwise names that are missing or unexpected are ignored.

        Raises:
            UnknownNameError: if names are missing or unexpected, and ``strict`` is True.
            ModelError: if the shapes of an array and its parameter or buffer differ.
        """
        own = self._state()
        given = {k: as_array(v) for k, v in state.items() if not k.endswith("num_batches_tracked")}
        missing, unexpected = sorted(set(own) - set(given)), sorted(set(given) - set(own))
        if strict and (missing or unexpected):
            parts = [f"lacks {', '.join(missing)}"] if missing else []
            parts += [f"has the unexpected {', '.join(unexpected)}"] if unexpected else []
            raise UnknownNameError(
                f"the state for {type(self).__name__} {' and '.join(parts)}; use strict=False to load only matching "
                "names"
            )
        for name, held in own.items():
            if name in given and given[name].shape != held.data.shape:
                raise ModelError(
                    f"'{name}' has shape {given[name].shape} in the state and {held.data.shape} in the module; create "
                    "the module with the same sizes as the saved one"
                )
        for name, held in own.items():
            if name in given:
                held.data = given[name].astype(held.data.dtype)

    def to(self: M, dtype: Any) -> M:
        """Convert all floating-point parameters and buffers to the element type ``dtype``, and return the module."""
        target = as_dtype(dtype)
        for held in {id(h): h for t in ("_parameters", "_buffers") for _, h in self._stored(t)}.values():
            if held.data.dtype.kind == "f" or held.data.dtype.name == "bfloat16":
                held.data = held.data.astype(target.numpy())
        return self

    def train(self: M, mode: bool = True) -> M:
        """Set the attribute ``training`` of all modules, which ``forward`` may read, and return the module.

        Dropout and BatchNormalization ignore it: ``export`` always writes their inference mode, and building a training
        step switches them to training mode.
        """
        for module in self.modules():
            object.__setattr__(module, "training", mode)
        return self

    def eval(self: M) -> M:
        """Return ``train(False)``."""
        return self.train(False)

    # --- printing ---

    def extra_repr(self) -> str:
        """Return the arguments of the constructor as text, for ``repr``."""
        return ""

    def __repr__(self) -> str:
        children = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()]
        inner = "".join(f"\n  {line}" for line in children)
        return f"{type(self).__name__}({self.extra_repr()}{inner}{chr(10) if inner else ''})"


_ABSENT = object()


def _forget(tables: Mapping[str, dict[str, Any]], name: str) -> bool:
    held = [table.pop(name, _ABSENT) for table in tables.values()]
    return any(value is not _ABSENT for value in held)


S = TypeVar("S", bound=Stored)


def _distinct(named: Iterable[tuple[str, S]], remove_duplicate: bool) -> Iterator[tuple[str, S]]:
    seen: set[int] = set()
    for name, held in named:
        if not remove_duplicate or id(held) not in seen:
            seen.add(id(held))
            yield name, held


# --- containers ----------------------------------------------------------------------------------


class _Numbered(Module):
    """Base class of containers whose modules are named 0, 1, 2, …"""

    def append(self: N, module: Module) -> N:
        """Append a module, under the next number."""
        self.register_module(str(len(self)), module)
        return self

    def extend(self: N, modules: Iterable[Module]) -> N:
        """Append several modules, in order."""
        for module in modules:
            self.append(module)
        return self

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, i: int | slice) -> Any:
        modules = list(self.children())
        return self._of(modules[i]) if isinstance(i, slice) else modules[i]

    def _of(self, modules: list[Module]) -> Module:
        raise NotImplementedError


class Sequential(_Numbered):
    """A chain of modules, each applied to the previous result: ``Sequential(a, b)``, or named modules in a mapping."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        single = modules[0] if len(modules) == 1 else None
        named = single.items() if isinstance(single, Mapping) else ((str(i), m) for i, m in enumerate(modules))
        for name, module in named:
            self.register_module(name, module)

    def forward(self, x: Any) -> Any:
        for module in self.children():
            x = module(x)
        return x

    def _of(self, modules: list[Module]) -> Sequential:
        return type(self)(*modules)


class ModuleList(_Numbered):
    """A list of submodules, registered with the module that contains it."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def _of(self, modules: list[Module]) -> ModuleList:
        return ModuleList(modules)


class ModuleDict(Module):
    """A dictionary of submodules, registered with the module that contains it."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.register_module(name, module)

    def __setitem__(self, name: str, module: Module) -> None:
        self.register_module(name, module)

    def __getitem__(self, name: str) -> Any:
        return self._modules[name]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: str) -> bool:
        return name in self._modules

    def keys(self) -> Iterable[str]:
        """Return the names of the submodules."""
        return self._modules.keys()

    def values(self) -> Iterable[Module | None]:
        """Return the submodules."""
        return self._modules.values()

    def items(self) -> Iterable[tuple[str, Module | None]]:
        """Return the submodules with their names."""
        return self._modules.items()


class ParameterList(Module):
    """A list of parameters, registered with the module that contains it."""

    def __init__(self, parameters: Iterable[Parameter] = ()) -> None:
        super().__init__()
        for parameter in parameters:
            self.append(parameter)

    def append(self, parameter: Parameter) -> ParameterList:
        """Append a parameter."""
        self.register_parameter(str(len(self)), parameter)
        return self

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return (p for p in self._parameters.values() if p is not None)

    def __getitem__(self, i: int) -> Parameter:
        return list(self)[i]


def clones(module: M, count: int) -> list[M]:
    """Return ``count`` independent copies of ``module``."""
    return [copy.deepcopy(module) for _ in range(count)]


def layers_in(names: Mapping[str, Any]) -> list[str]:
    """Return the names of the public layers that a module defines, given its ``globals()``."""
    return [name for name, value in names.items() if isinstance(value, type) and issubclass(value, Module)
            and value.__module__ == names["__name__"] and not name.startswith("_")]  # fmt: skip
