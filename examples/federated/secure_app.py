"""Secure aggregation (SecAgg+), which Flower 1.41 has on its older interface alone.

Clients add masks that cancel in the sum of all of them, so the server sees the mean, and no client's weights. These
go by their order there, which is that of the manifest on both sides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from client_app import opened, place
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import Grid, LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from server_app import WAIT, Plan, record
from step_folder import Arrays, StepFolder, UnusableError, batches_of

LARGEST = 8.0  # a weight beyond it is cut off, on its way through whole numbers


class SecureClient(NumPyClient):
    """As the client of ``client_app.py``."""

    def __init__(self, context: Context, folder: Path | None) -> None:
        step_path, data_path, self.number = place(context, folder)
        self.step = opened(step_path)
        self.data = self.step.data(data_path)

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        weights = dict(zip(self.step.weights(), parameters, strict=True))
        rows = len(next(iter(self.data.values())))
        seed = (config["seed"], self.number, config["round"])
        batches = batches_of(rows, config["batch-size"], config["epochs"], seed)
        after, loss = self.step.train(weights, self.data, batches)
        return list(after.values()), rows, {"loss": loss}


def secure_client_app(folder: Path | None = None) -> ClientApp:
    return ClientApp(client_fn=lambda context: SecureClient(context, folder).to_client(), mods=[secaggplus_mod])


def secure_server_app(folder: Path, plan: Plan) -> ServerApp:
    """As ``server_app``."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        step = StepFolder(folder / "step")
        held_out = step.data(folder / "held-out")
        rounds: list[dict[str, float]] = []
        final: Arrays = {}
        failed: list[int] = []  # rounds that left the weights what they were

        def evaluated(number: int, arrays: list[np.ndarray], _: Any) -> tuple[float, dict[str, Any]]:
            weights: Arrays = dict(zip(step.weights(), arrays, strict=True))
            found = step.evaluate(weights, held_out)
            rounds.append({"round": number, **found})
            if final and all(np.array_equal(weights[name], final[name]) for name in weights):
                failed.append(number)
            final.update(weights)
            return found[step.manifest["loss_output"]], dict(found)

        strategy = FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=plan.clients,
            min_available_clients=plan.clients,
            initial_parameters=ndarrays_to_parameters(list(step.weights().values())),
            evaluate_fn=evaluated,
            on_fit_config_fn=lambda number: {
                "round": number, "epochs": plan.epochs, "batch-size": plan.batch_size, "seed": plan.seed
            },
        )  # fmt: skip
        legacy = LegacyContext(context, ServerConfig(plan.rounds), strategy)
        rows = [len(next(iter(step.data(folder / f"client-{n}").values()))) for n in range(plan.clients)]
        secure = SecAggPlusWorkflow(1.0, 0.6, max_weight=float(max(rows)), clipping_range=LARGEST, timeout=WAIT)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)
        if failed:
            raise UnusableError(f"no sum came of {len(failed)} of {plan.rounds} rounds; --verbose says why")
        record(folder, plan, step, final, rounds, None)

    return app
