"""An actor and a critic that share a trunk learn to balance a pole on a cart, with a step and an optimizer for each.

The critic learns what each situation is worth, the actor to choose what turns out better than that. Both train the
trunk, each with moments of its own. The loop is written by hand: 16 carts move for 32 moments, then either step is done
once.

    python examples/actor_critic.py [--plot actor_critic.svg]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pictures

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

CARTS, MOMENTS, DISCOUNT = 16, 32, 0.98
Tensors = Mapping[str, frontend.Tensor]


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, situation: frontend.Tensor) -> dict[str, frontend.Tensor]:
        features = self.trunk(situation)
        return {"policy": self.actor(features), "value": self.critic(features).squeeze(1)}


def of_the_critic(out: Tensors, batch: Tensors) -> frontend.Tensor:
    return F.smooth_l1_loss(out["value"], batch["returns"])


def of_the_actor(out: Tensors, batch: Tensors) -> dict[str, frontend.Tensor]:
    logs = F.log_softmax(out["policy"], 1)
    taken = logs.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return {"choice": -(taken * batch["advantage"]).mean(), "entropy": 0.01 * (logs.exp() * logs).sum(1).mean()}


class Carts:
    """Poles on carts (Barto, Sutton, Anderson, 1983): place, speed, angle and its speed; one that falls begins anew."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.now, self.ages = self._new(CARTS), np.zeros(CARTS)

    def _new(self, count: int) -> np.ndarray:
        return self.rng.uniform(-0.05, 0.05, (count, 4))

    def push(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Push each cart left or right: which poles fell, and how long these had been up."""
        _, speed, angle, turning = self.now.T
        force = (20.0 * actions - 10.0 + 0.05 * turning**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * force) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        slide = force - 0.05 * turn * np.cos(angle) / 1.1
        self.now = self.now + 0.02 * np.stack([speed, slide, turning, turn], 1)
        self.ages += 1
        fell = (np.abs(self.now[:, 0]) > 2.4) | (np.abs(self.now[:, 2]) > 0.21) | (self.ages >= 500)
        lived = self.ages[fell]
        self.now[fell], self.ages[fell] = self._new(int(fell.sum())), 0
        return fell, lived


def lived_through(
    trainer: gg.Trainer, carts: Carts, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], list[Any]]:
    """What the actor meets in some moments, as a batch, and how long the poles that fell had been up."""
    seen, actions, values, falls, lives = [], [], [], [], []
    for _ in range(MOMENTS):
        situation = carts.now.astype(np.float32)
        found = trainer.predict(situation, batch_size=CARTS)
        right = 1 / (1 + np.exp(found["policy"][:, 0] - found["policy"][:, 1]))
        action = (rng.random(CARTS) < right).astype(np.int64)
        fell, lived = carts.push(action)
        for kept, new in zip((seen, actions, values, falls), (situation, action, found["value"], fell), strict=True):
            kept.append(new)
        lives += list(lived)
    worth = trainer.predict(carts.now.astype(np.float32), batch_size=CARTS)["value"]
    returns = []
    for fell in reversed(falls):
        worth = 1 + DISCOUNT * worth * ~fell
        returns.append(worth)
    returns.reverse()
    advantage = np.concatenate(returns) - np.concatenate(values)
    batch = {"situation": np.concatenate(seen), "action": np.concatenate(actions), "returns": np.concatenate(returns),
             "advantage": (advantage - advantage.mean()) / (advantage.std() + 1e-6)}  # fmt: skip
    return {n: a if n == "action" else a.astype(np.float32) for n, a in batch.items()}, lives


def draw(path: str, ups: list[float], values: list[float]) -> None:
    """How long poles stay up, and how far the critic is off, round after round."""
    with pictures.panels(path, 1, 2, height=2.4) as (up, off):
        up.plot(ups)
        up.set(xlabel="round", ylabel="moments that poles stay up", ylim=(0, None))
        off.plot(values, linewidth=0.8)
        off.set(xlabel="round", ylabel="loss of the critic", yscale="log")


def main(rounds: int = 250, plot: str | None = None) -> None:
    frontend.manual_seed(0)
    row, numbers = ("rows",), frontend.Input(("rows",), "int64")
    step = gg.build(frontend.export(ActorCritic(), {"situation": ("rows", 4)}), steps={
        "critic": gg.StepOptions(of_the_critic, gg.optim.adam(5e-3), train=["trunk.*", "critic.*"],
                                 targets={"returns": row}),
        "actor": gg.StepOptions(of_the_actor, gg.optim.adam(5e-3), train=["trunk.*", "actor.*"],
                                targets={"action": numbers, "advantage": row}),
    })  # fmt: skip
    trainer = gg.Trainer(step)
    rng = np.random.default_rng(0)
    carts, lives, before = Carts(rng), [], 0.0
    ups, losses = [], []
    for i in range(rounds):
        batch, lived = lived_through(trainer, carts, rng)
        lives = [*lives, *lived][-50:]
        before = before or (float(np.mean(lives)) if len(lives) == 50 else 0.0)
        critic, actor = trainer.step("critic", batch), trainer.step("actor", batch)
        ups.append(float(np.mean(lives)) if lives else 0.0)
        losses.append(float(critic["loss"]))
        if i % 50 == 49:
            print(f"round {i + 1:4}  poles stay up for {np.mean(lives):4.0f} moments; the critic is off by "
                  f"{critic['loss']:.2f}, the entropy of choices {-100 * actor['entropy']:.2f}")  # fmt: skip
    if plot is not None:
        draw(plot, ups, losses)
    print("it learnt to balance" if np.mean(lives) > 3 * before else "it did NOT learn")


if __name__ == "__main__":
    pictures.begin(main)
