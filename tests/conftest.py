"""Which cases of a sweep run, and native kernels for all tests.

A test marked ``sweep(share)`` runs that share of its cases, always the same ones. ``--sweeps 0.2`` runs at least a
fifth of every sweep, as continuous integration does, and ``--sweeps 1`` all cases. Shares follow from what a case
costs: no test function takes more than about a second by default. A single slow test whose subject others test,
too, has a share of 0, and runs with any ``--sweeps``.

Trainers use native kernels as they do where a user has installed them with a compiler at hand. Without a compiler the
tests run without, and so they do with GRADGRAPH_NATIVE_KERNELS=0.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import zlib

import pytest

from gradgraph import frontend
from gradgraph.backends.ort_native import in_use
from tests.kit import compiled_kernels

os.environ["GRADGRAPH_OPENINGS"] = "off"  # what an earlier run has left decides nothing
# Tests leave plain sessions of onnxruntime in cycles. A forked process that collected them would wait forever for the
# threads of their pools, which it does not have (``gradgraph.machine.forked_sessions``).
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=gc.freeze)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweeps", type=float, default=0.0, metavar="SHARE",
                     help="run at least this share of the cases of every sweep; 1 for all")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Have native kernels compiled by the process that starts the others, which find them."""
    if importlib.util.find_spec("hypothesis"):  # environments of other packages have pytest alone
        from hypothesis import settings

        settings.register_profile("tests", max_examples=150 if config.getoption("sweeps") else 50)
        settings.load_profile("tests")
    if hasattr(config, "workerinput"):
        return
    stands_in_the_way = compiled_kernels.use()
    if stands_in_the_way is not None:
        raise pytest.UsageError(stands_in_the_way)


@pytest.fixture(autouse=True)
def same_networks() -> None:
    """Draw the same weights whichever tests ran before."""
    frontend.manual_seed(0)


def pytest_report_header(config: pytest.Config) -> list[str]:
    share = config.getoption("sweeps")
    cases = f"at least {100 * share:.0f} % of the cases" if share else "a sample; --sweeps 1 runs every case"
    return [f"native kernels: {in_use.status()}", f"sweeps: {cases}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not in the sample of its sweep; tests that are named one by one run always."""
    if any("::" in argument for argument in config.args):
        return
    least = config.getoption("sweeps")
    sampled = {item for item in items if _sampled(item, least)}
    if least:  # at least one case of every sweep
        whole = {item.nodeid.partition("[")[0] for item in sampled}
        others = sorted((item for item in items if item not in sampled), key=_place, reverse=True)
        first = {item.nodeid.partition("[")[0]: item for item in others}
        sampled |= {item for function, item in first.items() if function not in whole}
    left_out = [item for item in items if item not in sampled]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in sampled]


def _sampled(item: pytest.Item, least: float) -> bool:
    """Return whether this case is in the sample of its sweep."""
    mark = item.get_closest_marker("sweep")
    if mark is None or (least and "[" not in item.name):
        return True
    return _place(item) < 1000 * max(mark.args[0], least)


def _place(item: pytest.Item) -> int:
    """Return the place of a case in its sweep, 0 to 999, by its name, so that it is the same in every run."""
    return zlib.crc32(item.name.encode()) % 1000
