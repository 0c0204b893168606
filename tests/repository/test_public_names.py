"""What an editor offers after the dot is what users may call: no imports, no submodules, nothing private."""

from types import FunctionType, ModuleType

import pytest

import gradgraph as gg

MODULES = [
    "augment",
    "extend",
    "export",
    "frontend",
    "losses",
    "metrics",
    "optim",
    "sound",
    "surgery",
    "text",
    "vision",
]


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_what_it_offers(name: str) -> None:
    module = getattr(gg, name)
    listed = dir(module)
    assert len(listed) > 4 and set(module.__all__) <= set(listed)
    for entry in listed:
        value = getattr(module, entry)
        assert not entry.startswith("_")
        assert not isinstance(value, ModuleType) or module.__name__ in value.__name__
        if isinstance(value, FunctionType | type):
            assert value.__module__.startswith("gradgraph."), entry


def test_the_package_lists_what_it_offers() -> None:
    assert set(dir(gg)) == {*gg.__all__, "__version__"}
    for entry in dir(gg):
        assert getattr(gg, entry) is not None
