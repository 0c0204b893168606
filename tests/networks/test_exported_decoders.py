"""Language models that torch.onnx.export writes from transformers' modules train as in PyTorch.

The packages are in no extra, as they are large: ``make shipped-models`` runs these tests in an environment of its own.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch exports its modules")
pytest.importorskip("transformers", reason="in no extra; `make shipped-models` runs these tests with it")
pytest.importorskip("peft", reason="PEFT is in no extra; `make shipped-models` runs these tests with it")

from tests.networks import exported_decoders as decoders
from tests.surgery.family_tables import lines_of, named

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


# the exporter unrolls the chunks of these into thousands of nodes: more than a minute each
SLOW = {name: pytest.param(name, marks=pytest.mark.sweep(0)) for name in ("qwen3-next", "qwen3.5")}


@pytest.mark.parametrize("family", [SLOW.get(name, name) for name in decoders.FAMILIES])
def test_a_family_is_as_the_page_says(family: str) -> None:
    assert f"| {' | '.join(decoders.row(family))} |" == lines_of("exported")[family]


def test_the_table_of_the_page_has_every_family() -> None:
    assert named("exported") == list(decoders.FAMILIES)
