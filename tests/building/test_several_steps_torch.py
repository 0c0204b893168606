"""Several named steps follow PyTorch's optimizers over one set of weights: a GAN, two rates, actor and critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest

import gradgraph as gg
from gradgraph import frontend
from gradgraph.frontend import functional as F
from gradgraph.frontend import nn

torch = pytest.importorskip("torch")

STEPS = 50
Tensors = Mapping[str, Any]


class Gan(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        between = [nn.BatchNorm1d(16)] if norm else []
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.discriminator = nn.Sequential(
            nn.Linear(2, 16, bias=not norm), *between, nn.LeakyReLU(0.2), nn.Linear(16, 1)
        )

    def forward(self, noise: Any, image: Any) -> dict[str, Any]:
        fake = self.generator(noise)
        return {"fake": fake, "real_score": self.discriminator(image), "fake_score": self.discriminator(fake)}


def gan(norm: bool = False) -> onnx.ModelProto:
    frontend.manual_seed(0)
    return frontend.export(Gan(norm), {"noise": ("rows", 4), "image": ("rows", 2)})


def telling_apart(out: Tensors, batch: Tensors) -> Any:
    real, fake = out["real_score"], out["fake_score"]
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def deceiving(out: Tensors, batch: Tensors) -> Any:
    return F.softplus(-out["fake_score"]).mean()


def torch_gan(model: onnx.ModelProto, norm: bool = False) -> Any:
    between = [torch.nn.BatchNorm1d(16)] if norm else []
    layers = {
        "generator": torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2)),
        "discriminator": torch.nn.Sequential(
            torch.nn.Linear(2, 16, bias=not norm), *between, torch.nn.LeakyReLU(0.2), torch.nn.Linear(16, 1)
        ),
    }
    net = torch.nn.ModuleDict(layers)
    weights = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    net.load_state_dict(weights, strict=False)
    return net


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    shape = {"noise": 4, "image": 2}
    return [{n: rng.normal(size=(24, k)).astype(np.float32) + (n == "image") for n, k in shape.items()}
            for _ in range(STEPS)]  # fmt: skip


OPTIMIZERS: dict[str, tuple[Any, Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "adam with rates and betas of their own": (
        gg.optim.adam(4e-3, betas=(0.5, 0.999)),
        gg.optim.adam(1e-3, betas=(0.0, 0.9)),
        lambda p: torch.optim.Adam(p, 4e-3, betas=(0.5, 0.999)),
        lambda p: torch.optim.Adam(p, 1e-3, betas=(0.0, 0.9)),
    ),
    "two time scales": (
        gg.optim.sgd(0.2, momentum=0.9),
        gg.optim.rmsprop(5e-4),
        lambda p: torch.optim.SGD(p, 0.2, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 5e-4),
    ),
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_a_gan_follows_pytorch(case: str, norm: bool) -> None:
    ours_d, ours_g, theirs_d, theirs_g = OPTIMIZERS[case]
    model = gan(norm)
    step = gg.build(model, steps={
        "discriminator": gg.StepOptions(telling_apart, ours_d, train="discriminator.*"),
        "generator": gg.StepOptions(deceiving, ours_g, train="generator.*"),
    })  # fmt: skip
    trainer, net = gg.Trainer(step), torch_gan(model, norm)
    d, g = net["discriminator"], net["generator"]
    of_d, of_g = theirs_d(d.parameters()), theirs_g(g.parameters())
    for batch in batches():
        noise, image = torch.tensor(batch["noise"]), torch.tensor(batch["image"])
        real, fake = d(image), d(g(noise).detach())
        loss_d = torch.nn.functional.softplus(-real).mean() + torch.nn.functional.softplus(fake).mean()
        of_d.zero_grad()
        loss_d.backward()
        of_d.step()
        loss_g = torch.nn.functional.softplus(-d(g(noise))).mean()
        of_g.zero_grad()
        loss_g.backward()
        of_g.step()
        assert float(trainer.step("discriminator", batch)["loss"]) == pytest.approx(loss_d.item(), abs=1e-4)
        assert float(trainer.step("generator", {"noise": batch["noise"]})["loss"]) == pytest.approx(
            loss_g.item(), abs=1e-4
        )


def test_running_statistics_move_at_each_call() -> None:
    """All networks that a step calls are in training mode, as in PyTorch; those that it does not call stay."""
    model, batch = gan(norm=True), batches()[0]
    step = gg.build(model, steps={
        "discriminator": gg.StepOptions(telling_apart, gg.optim.sgd(0.0), train="discriminator.*"),
        "generator": gg.StepOptions(deceiving, gg.optim.sgd(0.0), train="generator.*"),
    })  # fmt: skip
    trainer, net = gg.Trainer(step), torch_gan(model, norm=True)
    d, g = net["discriminator"], net["generator"]
    noise, image = torch.tensor(batch["noise"]), torch.tensor(batch["image"])
    with torch.no_grad():
        for name, calls in {"discriminator": [image, g(noise)], "generator": [g(noise)]}.items():
            trainer.step(name, batch)
            for x in calls:
                d(x)
            ours = trainer.state_dict()["discriminator.1.running_mean"]
            np.testing.assert_allclose(ours, d[1].running_mean.numpy(), atol=1e-6)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 12), nn.Tanh())
        self.actor, self.critic = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, state: Any) -> dict[str, Any]:
        features = self.trunk(state)
        return {"policy": self.actor(features), "value": self.critic(features)}


def of_the_actor(out: Tensors, batch: Tensors) -> Any:
    chosen = F.log_softmax(out["policy"], 1).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return -(chosen * batch["advantage"]).mean()


def of_the_critic(out: Tensors, batch: Tensors) -> Any:
    return F.mse_loss(out["value"].squeeze(1), batch["returns"])


def test_an_actor_and_a_critic_share_a_trunk_that_both_train() -> None:
    """Each optimizer has its own moments of the shared weights, as in PyTorch."""
    frontend.manual_seed(0)
    model = frontend.export(ActorCritic(), {"state": ("rows", 3)})
    fed = {"action": frontend.Input(("rows",), "int64"), "advantage": ("rows",)}
    step = gg.build(model, steps={
        "critic": gg.StepOptions(of_the_critic, gg.optim.adam(5e-3), train=["trunk.*", "critic.*"],
                                 targets={"returns": ("rows",)}),
        "actor": gg.StepOptions(of_the_actor, gg.optim.adam(gg.optim.exponential(2e-3, 0.98)),
                                train=["trunk.*", "actor.*"], targets=fed),
    })  # fmt: skip
    trainer = gg.Trainer(step)
    trunk = torch.nn.Sequential(torch.nn.Linear(3, 12), torch.nn.Tanh())
    net = torch.nn.ModuleDict({"trunk": trunk, "actor": torch.nn.Linear(12, 4), "critic": torch.nn.Linear(12, 1)})
    net.load_state_dict({t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer})
    of_c = torch.optim.Adam([*trunk.parameters(), *net["critic"].parameters()], 5e-3)
    of_a = torch.optim.Adam([*trunk.parameters(), *net["actor"].parameters()], 2e-3)
    decay = torch.optim.lr_scheduler.ExponentialLR(of_a, 0.98)
    rng = np.random.default_rng(2)
    for _ in range(STEPS):
        batch: dict[str, Any] = {"state": rng.normal(size=(16, 3)).astype(np.float32)}
        batch |= {name: rng.normal(size=16).astype(np.float32) for name in ("advantage", "returns")}
        batch["action"] = rng.integers(0, 4, 16)
        x = {name: torch.tensor(value) for name, value in batch.items()}
        value_loss = torch.nn.functional.mse_loss(net["critic"](trunk(x["state"])).squeeze(1), x["returns"])
        of_c.zero_grad()
        value_loss.backward()
        of_c.step()
        chosen = torch.log_softmax(net["actor"](trunk(x["state"])), 1).gather(1, x["action"].unsqueeze(1)).squeeze(1)
        policy_loss = -(chosen * x["advantage"]).mean()
        of_a.zero_grad()
        policy_loss.backward()
        of_a.step()
        decay.step()
        assert float(trainer.step("critic", batch)["loss"]) == pytest.approx(value_loss.item(), abs=1e-4)
        assert float(trainer.step("actor", batch)["loss"]) == pytest.approx(policy_loss.item(), abs=1e-4)


class Critics(nn.Module):
    """A critic that is called three times: on real points, on made ones, and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, noise: Any, image: Any, share: Any) -> dict[str, Any]:
        fake = self.generator(noise)
        between = share * image + (1 - share) * frontend.detach(fake)
        return {"of_real": self.critic(image), "of_fake": self.critic(fake), "between": between,
                "of_between": self.critic(between)}  # fmt: skip


def with_penalty(out: Tensors, batch: Tensors) -> Any:
    slope = frontend.grad(out["of_between"].sum(), out["between"])
    lengths = slope.square().sum(1).sqrt()
    return out["of_fake"].mean() - out["of_real"].mean() + 10 * (lengths - 1).square().mean()


def test_a_critic_with_a_penalty_and_a_generator_on_every_fifth_batch_follow_pytorch() -> None:
    """WGAN-GP, by ``fit``: gradients of the critic's gradient, at weights of which others are another step's."""
    frontend.manual_seed(0)
    model = frontend.export(Critics(), {"noise": ("rows", 4), "image": ("rows", 2), "share": ("rows", 1)})
    rates = {"lr": 1e-3, "betas": (0.5, 0.9)}
    step = gg.build(model, steps={
        "critic": gg.StepOptions(with_penalty, gg.optim.adam(**rates), train="critic.*"),
        "generator": gg.StepOptions(lambda out, batch: -out["of_fake"].mean(), gg.optim.adam(**rates), train="gen*"),
    })  # fmt: skip
    rng, ours = np.random.default_rng(3), list[dict[str, float]]()
    data = {n: rng.normal(size=(30 * 16, k)).astype(np.float32) for n, k in {"noise": 4, "image": 2}.items()}
    data["share"] = rng.random((30 * 16, 1)).astype(np.float32)

    class Watch:
        def on_step(self, trainer: gg.Trainer, results: Mapping[str, Any]) -> None:
            ours.append({name: float(value) for name, value in results.items()})

    gg.Trainer(step).fit(data, batch_size=16, shuffle=False, every={"generator": 5}, callbacks=[Watch()],
                         progress=False)  # fmt: skip
    g = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    c = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))
    weights = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    torch.nn.ModuleDict({"generator": g, "critic": c}).load_state_dict(weights)
    of_c, of_g = torch.optim.Adam(c.parameters(), **rates), torch.optim.Adam(g.parameters(), **rates)
    for i, found in enumerate(ours):
        noise, image, share = (torch.tensor(data[n][16 * i : 16 * i + 16]) for n in ("noise", "image", "share"))
        fake = g(noise).detach()
        between = (share * image + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(c(between).sum(), between, create_graph=True)
        loss = c(fake).mean() - c(image).mean() + 10 * (slope.square().sum(1).sqrt() - 1).square().mean()
        of_c.zero_grad()
        loss.backward()
        of_c.step()
        assert found["critic.loss"] == pytest.approx(loss.item(), abs=1e-4)
        assert ("generator.loss" in found) == (i % 5 == 4)
        if i % 5 == 4:
            loss = -c(g(noise)).mean()
            of_g.zero_grad()
            loss.backward()
            of_g.step()
            assert found["generator.loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert len(ours) == 30
