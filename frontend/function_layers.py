"""Layers made from functions: options are set in the constructor, and the function is applied in ``forward``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gradgraph.arguments import bound
from gradgraph.frontend.module import Module


class FunctionLayer(Module):
    """Base class of layers that apply a function: options are passed to the constructor, tensors to the call.

    Options are attributes under their names, as in ``torch.nn``.
    """

    _computes: Callable[..., Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        given = bound(type(self), inspect.signature(type(self)), arguments, options)
        given.apply_defaults()
        for name, value in given.arguments.items():
            setattr(self, name, value)

    def forward(self, *tensors: Any) -> Any:
        return type(self)._computes(*tensors, **self._options())

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self._options().items() if value is not None and name != "inplace"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def layer_of(module: str, name: str, function: Callable[..., Any], options: str = "") -> type[FunctionLayer]:
    """Return a layer class that applies a function.

    Args:
        module: the module in which the class is defined.
        name: the name of the class.
        function: the function; the class gets its docstring.
        options: the parameters of the function that are arguments of the constructor, in order, separated by spaces.
    """
    known = inspect.signature(function).parameters
    given = [known[option].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options.split()]
    members = {
        "__doc__": function.__doc__,
        "__module__": module,
        "__signature__": inspect.Signature(given),
        "_computes": staticmethod(function),
    }
    return type(name, (FunctionLayer,), members)
