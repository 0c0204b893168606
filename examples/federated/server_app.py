"""The Flower server: which strategy averages the weights, privacy with its account, and what the rounds came to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from client_app import arrays_of, record_of
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import Grid, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod, ServerApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Strategy,
)
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from step_folder import Arrays, StepFolder, UnusableError

STRATEGIES: dict[str, Callable[..., FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": lambda **given: FedProx(proximal_mu=0.1, **given),
    "fedavgm": lambda **given: FedAvgM(server_momentum=0.9, **given),
    "fedadam": lambda **given: FedAdam(eta=0.01, tau=0.001, **given),
    "fedyogi": lambda **given: FedYogi(eta=0.01, tau=0.001, **given),
}
WAIT = 600  # seconds for the answers of a round; a client that is gone is waited for so long


@dataclass(frozen=True)
class Plan:
    """What a run is: the names are those of the options, and of ``run-config``."""

    strategy: str = "fedavg"
    rounds: int = 10
    clients: int = 4
    epochs: int = 1
    batch_size: int = 32
    seed: int = 0
    node_clients: int = 0  # so many of them, the first ones, train in Node.js
    noise: float = 0.0  # of the Gaussian mechanism, in clipping norms; 0: without differential privacy
    clip: float = 1.0
    delta: float = 1e-3
    secure: bool = False  # SecAgg+: the server sees the sum alone

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UnusableError(f"there is no strategy '{self.strategy}'; choose one of {', '.join(STRATEGIES)}")
        for name in ("rounds", "clients", "epochs", "batch_size"):
            if getattr(self, name) < 1 + (name == "clients"):
                raise UnusableError(f"{name} is {getattr(self, name)}; give {1 + (name == 'clients')} or more")
        if self.noise < 0 or self.clip <= 0 or not 0 < self.delta < 1:
            raise UnusableError("noise is 0 or above, clip above 0, delta between 0 and 1; give such numbers")
        if self.noise and self.strategy != "fedavg":
            raise UnusableError("the account of privacy holds for plain means; give --strategy fedavg with --noise")
        if self.secure and (self.noise or self.strategy != "fedavg"):
            raise UnusableError("secure aggregation is Flower's older interface, without noise and other strategies; "
                                "give --secure alone")  # fmt: skip

    @classmethod
    def of(cls, told: Any) -> Plan:
        """From Flower's ``run-config``."""
        known = {f.name.replace("_", "-"): f.name for f in fields(cls)}
        return cls(**{known[name]: value for name, value in told.items() if name in known})


class Answers:
    """Counts who answers: a mean goes on without clients that failed, and that is said."""

    def __init__(self, clients: int) -> None:
        self.clients, self.rounds = clients, 0

    def __call__(self, records: list[RecordDict], key: str) -> MetricRecord:
        self.rounds += 1
        if len(records) < self.clients:
            print(f"{len(records)} of {self.clients} clients answered in a round; the mean is theirs", file=sys.stderr)
        return aggregate_metricrecords(records, key)


def strategy_of(plan: Plan, step: StepFolder, answers: Answers) -> Strategy:
    counts: dict[str, Any] = {"fraction_evaluate": 0.0, "train_metrics_aggr_fn": answers}
    counts |= {f"min_{part}_nodes": plan.clients for part in ("train", "available")}
    if not plan.noise:
        return STRATEGIES[plan.strategy](**counts)
    if statistics := [s["name"] for s in step.manifest["state"] if s["kind"] == "statistic"]:
        raise UnusableError(
            f"noise would be added to running statistics ('{statistics[0]}'); use GroupNorm or LayerNorm with --noise"
        )
    # one client's update moves the mean by at most clip / clients: that needs the same weight for all of them
    inner = FedAvg(weighted_by_key="one", **counts)
    return DifferentialPrivacyServerSideFixedClipping(
        inner, plan.noise, plan.clip, plan.clients, accountant=accountant_of(plan)
    )


def accountant_of(plan: Plan) -> RdpAccountant:
    """Rényi differential privacy of Google's dp-accounting, for whole clients that take part in every round."""
    return RdpAccountant(
        PrivacyConfig(
            target_delta=plan.delta,
            population_size=plan.clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )


def record(
    folder: Path, plan: Plan, step: StepFolder, weights: Arrays, rounds: list[dict[str, float]], epsilon: float | None
) -> None:
    """Write rounds.json and weights.npz beside the step."""
    np.savez(folder / "weights.npz", **weights)  # type: ignore[arg-type]
    sent = sum(value.nbytes for value in step.weights().values())
    told = {"plan": asdict(plan), "bytes": sent, "epsilon": epsilon, "rounds": rounds}
    (folder / "rounds.json").write_text(json.dumps(told, indent=1), "utf-8")


def server_app(folder: Path | None = None, plan: Plan | None = None) -> ServerApp:
    """The app of the server; ``folder`` has a step and the data that no client has."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        root = folder or Path(str(context.run_config["folder"]))
        told = plan or Plan.of(context.run_config)
        step = StepFolder(root / "step")
        held_out = step.data(root / "held-out")
        rounds: list[dict[str, float]] = []

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
            found = step.evaluate(arrays_of(arrays), held_out)
            rounds.append({"round": number, **found})
            return MetricRecord(found)

        answers = Answers(told.clients)
        strategy = strategy_of(told, step, answers)
        config = ConfigRecord({"epochs": told.epochs, "batch-size": told.batch_size, "seed": told.seed,
                               "node-clients": told.node_clients})  # fmt: skip
        result = strategy.start(
            grid, record_of(step.weights()), told.rounds, timeout=WAIT, train_config=config, evaluate_fn=evaluated
        )
        if answers.rounds < told.rounds:
            raise UnusableError(
                f"no client answered in {told.rounds - answers.rounds} of {told.rounds} rounds; --verbose says why"
            )
        spent = strategy.privacy_spent() if isinstance(strategy, DifferentialPrivacyServerSideFixedClipping) else None
        record(root, told, step, arrays_of(result.arrays), rounds, spent.epsilon if spent else None)

    return app


app = server_app()  # what `flwr run` loads
