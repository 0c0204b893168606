"""JAX: the whole step under ``jax.jit``, with donated state, so that it may be updated in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.job import CannotError, Job
from benchmarks.peers.jax_networks import NETWORKS

Tree = Any  # dicts of arrays


class Peer:
    versions = f"jax {jax.__version__}"

    def __init__(self, job: Job) -> None:
        if job.workload not in NETWORKS:
            raise CannotError("not written in JAX here (benchmarks/peers/jax_networks.py)")
        with np.load(job.path("weights.npz")) as arrays:
            params = {name: jnp.asarray(value) for name, value in arrays.items()}
        batch = job.batch()
        self.batch = jnp.asarray(batch["x"]), jnp.asarray(batch["target"])
        begin, update = OPTIMIZERS[job.optimizer]
        self.state = params, begin(params)
        network = NETWORKS[job.workload]

        def loss(params: Tree, x: jax.Array, target: jax.Array) -> jax.Array:
            logs = jax.nn.log_softmax(network(params, x), axis=1)
            return -jnp.take_along_axis(logs, target[:, None], axis=1).mean()

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Tree, x: jax.Array, target: jax.Array) -> tuple[Tree, jax.Array]:
            value, gradients = jax.value_and_grad(loss)(state[0], x, target)
            return update(*state, gradients, job.learning_rate), value

        self.compiled = step

    def step(self) -> float:
        self.state, loss = self.compiled(self.state, *self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


def sgd(params: Tree, slots: Tree, gradients: Tree, rate: float) -> tuple[Tree, Tree]:
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients), slots


def adamw(params: Tree, slots: Tree, gradients: Tree, rate: float) -> tuple[Tree, Tree]:
    """Return updated parameters and moments of AdamW with PyTorch's defaults."""
    count, m, v = slots
    count = count + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradients)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradients)
    first, second = 1 - 0.9**count, 1 - 0.999**count

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p * (1 - rate * 0.01) - rate * (m / first) / (jnp.sqrt(v / second) + 1e-8)

    return jax.tree.map(updated, params, m, v), (count, m, v)


def zeros(params: Tree) -> Tree:
    return jnp.zeros(()), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


OPTIMIZERS = {"sgd": (lambda params: (), sgd), "adamw": (zeros, adamw)}
