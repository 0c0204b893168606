"""The Flower client: trains a step folder in stock onnxruntime, without gradgraph."""

from __future__ import annotations

import functools
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from node_client import NodeClient
from step_folder import Arrays, StepFolder, batches_of


@functools.cache
def opened(step: Path) -> StepFolder:
    """The step, opened once in a process."""
    return StepFolder(step)


@functools.cache
def in_node(step: Path, data: Path) -> NodeClient:
    return NodeClient(step, data)


def arrays_of(record: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in record.items()}


def record_of(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


def place(context: Context, folder: Path | None) -> tuple[Path, Path, int]:
    """The step folder, the client's own data, and its number.

    A device says where they are when it starts (``flower-supernode --node-config 'step="…" data="…" partition-id=0'``);
    in a simulation they are in one folder.
    """
    number = int(context.node_config.get("partition-id", 0))
    if "data" in context.node_config:
        return Path(str(context.node_config["step"])), Path(str(context.node_config["data"])), number
    root = folder or Path(str(context.run_config["folder"]))
    return root / "step", root / f"client-{number}", number


def client_app(folder: Path | None = None) -> ClientApp:
    """The app of all clients; ``folder`` has a step and each client's data."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        step_path, data_path, number = place(context, folder)
        told = message.content.config_records["config"]
        weights = arrays_of(message.content.array_records["arrays"])
        step = opened(step_path)
        data = step.data(data_path)
        rows = len(next(iter(data.values())))
        seed = (int(told["seed"]), number, int(told["server-round"]))
        batches = batches_of(rows, int(told["batch-size"]), int(told["epochs"]), seed)
        proximal = float(told.get("proximal-mu", 0.0))
        if number < int(told.get("node-clients", 0)):
            after, loss = in_node(step_path, data_path).train(weights, batches, proximal)
        else:
            after, loss = step.train(weights, data, batches, proximal)
        found = MetricRecord({"num-examples": rows, "one": 1.0, "loss": loss})
        return Message(RecordDict({"arrays": record_of(after), "metrics": found}), reply_to=message)

    return app


app = client_app()  # what `flwr run` and `flower-supernode` load
