"""Functions with fixed options as layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gradgraph.arguments import bound
from gradgraph.frontend.module import Module


class FunctionLayer(Module):
    """The base of such layers: options when it is made, tensors when it is called."""

    _computes: Callable[..., Any]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        given = bound(type(self), inspect.signature(type(self)), arguments, options)
        given.apply_defaults()
        self.options = dict(given.arguments)

    def forward(self, *tensors: Any) -> Any:
        return type(self)._computes(*tensors, **self.options)

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.options.items() if value is not None and name != "inplace"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def layer_of(module: str, name: str, function: Callable[..., Any], options: str = "") -> type[FunctionLayer]:
    """The layer of a function, whose ``options`` it has in this order; it has the function's docstring."""
    known = inspect.signature(function).parameters
    given = [known[option].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options.split()]
    members = {
        "__doc__": function.__doc__,
        "__module__": module,
        "__signature__": inspect.Signature(given),
        "_computes": staticmethod(function),
    }
    return type(name, (FunctionLayer,), members)
