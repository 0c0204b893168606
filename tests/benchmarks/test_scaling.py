"""benchmarks.scaling: formulas by hand, a fit that finds what was put in, a page that is what the command writes."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ET

import pytest

from benchmarks import scaling, scaling_model, scaling_page
from benchmarks.scaling_model import ALL_REDUCES, LINKS, NETWORKS, WIRES, Link, Message, efficiency, fitted, seconds_of

UNIT = Link(1.0, 1e-3)  # a second a message, a millisecond a byte

# by hand, 1,000 bytes: p = 2 is two messages of 500; p = 4: 6 or 4 rounds, 1,500 bytes, or 4 rounds of 1,000
BY_HAND = [
    ("ring", 2, 2 + 1.0),
    ("ring", 4, 6 + 1.5),
    ("ring", 8, 14 + 1.75),
    ("halving", 2, 2 + 1.0),
    ("halving", 4, 4 + 1.5),
    ("halving", 5, 6 + 1.6),
    ("tree", 4, 4 + 4.0),
    ("tree", 1024, 20 + 20.0),
]


@pytest.mark.parametrize(("name", "ranks", "seconds"), BY_HAND)
def test_messages_take_what_the_formulas_say(name: str, ranks: int, seconds: float) -> None:
    assert seconds_of(ALL_REDUCES[name](ranks, 1000), UNIT) == pytest.approx(seconds)


def test_the_soonest_counts_and_one_rank_sends_nothing() -> None:
    assert scaling_model.all_reduce(1, 1e9, UNIT) == 0
    assert scaling_model.all_reduce(8, 1000, UNIT) == pytest.approx(6 + 1.75)
    assert seconds_of(scaling_model.gathering(4, 1000), UNIT) == pytest.approx(3 + 3.0)


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_the_fit_finds_the_link_of_timings(name: str) -> None:
    link, formula = Link(37e-6, 0.8e-9), ALL_REDUCES[name]
    exact = [Message(p, n, seconds_of(formula(p, n), link)) for p in (2, 4) for n in scaling.SIZES]
    found = fitted(exact, formula)
    assert found.latency == pytest.approx(link.latency)
    assert found.per_byte == pytest.approx(link.per_byte)
    noisy = [Message(m.ranks, m.size, m.seconds * (1.1 if i % 2 else 0.9)) for i, m in enumerate(exact)]
    assert fitted(noisy, formula).per_byte == pytest.approx(link.per_byte, rel=0.15)


def test_a_link_is_not_below_zero() -> None:
    falling = [Message(2, 1000, 5e-3), Message(2, 1_000_000, 1e-3)]
    found = fitted(falling, ALL_REDUCES["ring"])
    assert found.latency > 0
    assert found.per_byte == 0
    with pytest.raises(ValueError, match="two messages or more"):
        fitted(falling[:1], ALL_REDUCES["ring"])


PARAMETERS = {"ResNet-50": 25_557_032, "BERT-base": 109_483_778, "GPT-2": 124_439_808,
              "LoRA, 1.2 billion weights": 16 * 2 * 8 * 1984}  # fmt: skip


@pytest.mark.parametrize("net", NETWORKS, ids=lambda net: net.name)
def test_networks_have_the_weights_of_the_models(net: scaling_model.Network) -> None:
    assert net.numbers == PARAMETERS[net.name]
    assert net.low_rank(4) < net.size
    assert net.low_rank(10_000) == net.size


def test_efficiency_by_hand() -> None:
    """ResNet-50 on eight ranks over 1 Gbit/s: 7.854 ms of computing; 6 latencies and 7/4 of 102.2 MB at 8 ns a byte."""
    message = 6 * 50e-6 + 1.75 * 4 * 25_557_032 * 8e-9
    computing = 3 * 130.9e9 / 50e12
    assert efficiency(NETWORKS[0], 8, LINKS["1 Gbit/s"]) == pytest.approx(computing / (computing + message))


@pytest.mark.parametrize("net", NETWORKS, ids=lambda net: net.name)
@pytest.mark.parametrize("wire", WIRES)
def test_more_ranks_and_slower_links_are_never_better(net: scaling_model.Network, wire: str) -> None:
    found = [[efficiency(net, n, link, wire) for n in scaling_page.COUNTS] for link in LINKS.values()]
    for row in found:
        assert row == sorted(row, reverse=True)
    for slower, faster in itertools.pairwise(found):
        assert all(a < b for a, b in zip(slower, faster, strict=True))


@pytest.mark.parametrize("wire", [name for name in WIRES if name != "dense"])
def test_wires_are_called_as_gradgraph_calls_them(wire: str) -> None:
    page = (scaling.ROOT / "docs" / "how-to" / "many-machines.md").read_text("utf-8")
    assert f"| `{wire.partition('(')[0]}" in page


def test_page_and_drawing_are_what_the_command_writes() -> None:
    told = json.loads((scaling.FOLDER / "scaling.json").read_text("utf-8"))
    again = "python -m benchmarks.scaling --page"
    assert (scaling.FOLDER / "scaling.md").read_text("utf-8") == scaling_page.page(told), again
    assert (scaling.FOLDER / "scaling.svg").read_text("utf-8") == scaling_page.drawing(), again
    assert len(list(ET.fromstring(scaling_page.drawing()).iter("{http://www.w3.org/2000/svg}polyline"))) == 4 * 6 + 4
    assert {row["ranks"] for row in told["messages"]} == {2, 4}
