"""A model of time per step on many ranks: computation, latency, bandwidth and compression of messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

REPEATS = 30  # of a message; the fastest counts


@dataclass(frozen=True)
class Link:
    """The time of a message between two ranks: ``latency`` seconds, and seconds per byte (including addition)."""

    latency: float
    per_byte: float


def link_of(gigabits: float, latency: float) -> Link:
    """Return the link of a network with ``gigabits`` Gbit/s and ``latency`` seconds."""
    return Link(latency, 8 / (gigabits * 1e9))


# --- messages --------------------------------------------------------------------------------------------
# Times are linear in the two numbers of a link; each function returns their factors, for ``size`` bytes.

Factors = tuple[float, float]


def ring(ranks: int, size: float) -> Factors:
    """Return the factors of latency and seconds per byte of reduce-scatter and all-gather in a ring.

    ``2 (p - 1) latency + 2 (p - 1) / p size per_byte`` (Patarasuk and Yuan 2009; Thakur et al. 2005): no all-reduce
    sends fewer bytes.
    """
    return 2.0 * (ranks - 1), 2.0 * (ranks - 1) / ranks * size


def halving(ranks: int, size: float) -> Factors:
    """Return the factors of latency and seconds per byte of recursive halving and doubling.

    ``2 ceil(log2 p) latency + 2 (p - 1) / p size per_byte`` (Rabenseifner; Thakur et al. 2005): the bytes of a ring in
    fewer rounds.
    """
    return 2.0 * _rounds(ranks), 2.0 * (ranks - 1) / ranks * size


def tree(ranks: int, size: float) -> Factors:
    """Return the factors of a binomial tree (Thakur et al. 2005): ``2 ceil(log2 p) (latency + size per_byte)``."""
    return 2.0 * _rounds(ranks), 2.0 * _rounds(ranks) * size


def gathering(ranks: int, size: float) -> Factors:
    """Return the factors of an all-gather of ``size`` bytes per rank in a ring, for numbers that cannot be added."""
    return float(ranks - 1), (ranks - 1) * size


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


ALL_REDUCES: dict[str, Callable[[int, float], Factors]] = {"ring": ring, "halving": halving, "tree": tree}


def seconds_of(factors: Factors, link: Link) -> float:
    return factors[0] * link.latency + factors[1] * link.per_byte


def all_reduce(ranks: int, size: float, link: Link) -> float:
    """Return the seconds of the fastest of the three all-reduces, as libraries choose by size."""
    if ranks == 1:
        return 0.0
    return min(seconds_of(formula(ranks, size), link) for formula in ALL_REDUCES.values())


@dataclass(frozen=True)
class Message:
    """A timed all-reduce of ``size`` bytes."""

    ranks: int
    size: int
    seconds: float


def fitted(messages: Sequence[Message], formula: Callable[[int, float], Factors]) -> Link:
    """Return the link that minimizes the squared relative errors; its numbers are not negative.

    Raises:
        ValueError: there are fewer than two messages.
    """
    if len(messages) < 2:
        raise ValueError("a link has two numbers; give two messages or more")
    rows = np.array([[f / m.seconds for f in formula(m.ranks, m.size)] for m in messages])
    ones = np.ones(len(rows))
    found = np.linalg.lstsq(rows, ones, rcond=None)[0]
    if (found < 0).any():
        kept = int(found.argmax())
        found = np.zeros(2)
        found[kept] = rows[:, kept] @ ones / (rows[:, kept] @ rows[:, kept])
    return Link(float(found[0]), float(found[1]))


# --- steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network that is trained on each rank.

    Args:
        batch: the batch of a rank, in words.
        matrices: the shapes of the trained weights as matrices ``[outputs, the rest]``.
        vectors: the number of other trained numbers.
        here: seconds of gradgraph's step on two cores, from the first machine of performance.md; for LoRA, on one core,
            from large-models.md.
        flops: operations of a step, forward and backward.
    """

    name: str
    batch: str
    matrices: tuple[tuple[int, int], ...]
    vectors: int
    here: float
    flops: float

    @property
    def numbers(self) -> int:
        return sum(a * b for a, b in self.matrices) + self.vectors

    @property
    def size(self) -> int:
        """The bytes of the gradients in float32."""
        return 4 * self.numbers

    def low_rank(self, rank: int) -> float:
        """Return the bytes of vectors, and of matrices or PowerSGD's factors if smaller (Vogels et al. 2019)."""
        return 4.0 * (sum(min(rank * (a + b), a * b) for a, b in self.matrices) + self.vectors)


def resnet50_matrices() -> tuple[tuple[int, int], ...]:
    found, inputs = [(64, 3 * 49)], 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            found += [(width, inputs), (width, width * 9), (4 * width, width)]
            if block == 0:
                found.append((4 * width, inputs))
            inputs = 4 * width
    return (*found, (1000, 2048))


def transformer_matrices(layers: int, width: int, tables: Sequence[int]) -> tuple[tuple[int, int], ...]:
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return (*layer * layers, *((rows, width) for rows in tables))


RESNET_VECTORS = 2 * sum(outputs for outputs, _ in resnet50_matrices()[:-1]) + 1000
LLAMA_WIDTH, LLAMA_LAYERS = 1984, 16  # in 4 bits: a file of 0.92 GB, adapters of rank 8 at one product per layer
LLAMA_NUMBERS = 16 * LLAMA_LAYERS * LLAMA_WIDTH**2 + 2 * 32_000 * LLAMA_WIDTH
NETWORKS = (
    Network("ResNet-50", "16 images", resnet50_matrices(), RESNET_VECTORS, 2.911, 3 * 130.9e9),
    Network("BERT-base", "8 × 128 tokens", transformer_matrices(12, 768, (30522, 512, 2, 768, 2)),
            12 * 13 * 768 + 2 * 768 + 768 + 2, 3.454, 3 * 178.8e9),
    Network("GPT-2", "2 × 512 tokens", transformer_matrices(12, 768, (50257, 1024)), 12 * 13 * 768 + 2 * 768,
            6.691, 3 * 272.3e9),
    Network("LoRA, 1.2 billion weights", "128 tokens", ((8, LLAMA_WIDTH), (LLAMA_WIDTH, 8)) * LLAMA_LAYERS, 0,
            8.8, 4 * LLAMA_NUMBERS * 128),
)  # fmt: skip
LINKS = {"1 Gbit/s": link_of(1, 50e-6), "10 Gbit/s": link_of(10, 20e-6), "100 Gbit/s": link_of(100, 5e-6)}
ACCELERATOR = 50e12  # operations per second
EVERY = {"local_sgd": 8, "diloco": 100}  # steps between two messages

# seconds of a step's message, by the name of the compression in ``DataParallel(compress=…)``
WIRES: dict[str, Callable[[Network, int, Link], float]] = {
    "dense": lambda net, ranks, link: all_reduce(ranks, net.size, link),
    "float16": lambda net, ranks, link: seconds_of(ring(ranks, net.size / 2), link),  # all-to-all, then all-gather
    "top_k(ratio=0.01)": lambda net, ranks, link: seconds_of(gathering(ranks, 0.01 * 2 * net.size), link),
    "power_sgd(rank=4)": lambda net, ranks, link: all_reduce(ranks, net.low_rank(4), link),
    "local_sgd(every=8)": lambda net, ranks, link: all_reduce(ranks, net.size, link) / EVERY["local_sgd"],
    "diloco(every=100)": lambda net, ranks, link: all_reduce(ranks, net.size, link) / EVERY["diloco"],
}
SPEEDS: dict[str, Callable[[Network], float]] = {
    "this processor": lambda net: net.here,
    "50 TFLOP/s": lambda net: net.flops / ACCELERATOR,
}


def efficiency(network: Network, ranks: int, link: Link, wire: str = "dense", speed: str = "50 TFLOP/s") -> float:
    """Return the share of computation in a step, with a constant batch per rank and messages after computation."""
    computing = SPEEDS[speed](network)
    return computing / (computing + WIRES[wire](network, ranks, link))


def predicted(step: dict[str, float], ranks: int, cores: int, size: int, link: Link) -> float:
    """Return the seconds of a step on ``ranks`` of one thread, from the seconds of one rank in ``step``."""
    ours = step["step"] - step["computing"]
    return (step["computing"] + ours) * max(1.0, ranks / cores) + all_reduce(ranks, size, link)
