"""Which cases of a sweep run, and native kernels for all tests.

A test marked ``sweep(share)`` runs that share of its cases, always the same ones, and with ``--whole`` all of them, as
continuous integration does. Shares follow from what a case costs: no test takes more than some two seconds of a
processor by default. A single slow test whose subject others test, too, has a share of 0.

Trainers use native kernels as they do where a user has installed them with a compiler at hand. Without a compiler the
tests run without, and so they do with GRADGRAPH_NATIVE_KERNELS=0.
"""

from __future__ import annotations

import os
import zlib

import pytest
from hypothesis import settings

from gradgraph.backends.ort_native import in_use
from tests.kit import compiled_kernels

os.environ["GRADGRAPH_OPENINGS"] = "off"  # what an earlier run has left decides nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run every case of every sweep, not a sample")


def pytest_configure(config: pytest.Config) -> None:
    """Have native kernels compiled by the process that starts the others, which find them."""
    settings.register_profile("tests", max_examples=150 if config.getoption("whole") else 50)
    settings.load_profile("tests")
    if hasattr(config, "workerinput"):
        return
    stands_in_the_way = compiled_kernels.use()
    if stands_in_the_way is not None:
        raise pytest.UsageError(stands_in_the_way)


def pytest_report_header(config: pytest.Config) -> list[str]:
    cases = "every case" if config.getoption("whole") else "a sample; --whole runs every case"
    return [f"native kernels: {in_use.status()}", f"sweeps: {cases}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is not in the sample of its sweep; tests that are named one by one run always."""
    if config.getoption("whole") or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if not _sampled(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _sampled(item)]


def _sampled(item: pytest.Item) -> bool:
    """Is this case in the sample? Decided by its name, so that it is the same one in every process and run."""
    mark = item.get_closest_marker("sweep")
    return mark is None or zlib.crc32(item.name.encode()) % 1000 < 1000 * mark.args[0]
