"""Run server and clients of one folder on this machine: python simulate.py FOLDER [--rounds 10 …].

FOLDER has step/, held-out/ and client-0/, client-1/, …; rounds.json and weights.npz are written there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0",
         "ORT_DISABLE_TELEMETRY": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "OMP_NUM_THREADS": "1"}  # fmt: skip
os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})

from client_app import client_app  # noqa: E402 (after what keeps Flower and Ray from reporting to anybody)
from flwr.simulation import run_simulation  # noqa: E402
from secure_app import secure_client_app, secure_server_app  # noqa: E402
from server_app import Plan, server_app  # noqa: E402
from step_folder import StepFolder, UnusableError  # noqa: E402


def simulate(folder: Path, plan: Plan) -> None:
    """All rounds."""
    os.environ.setdefault("FLWR_HOME", str(folder / "flower"))
    step = StepFolder(folder / "step")
    for number in range(plan.clients):
        step.data(folder / f"client-{number}")
    written = folder / "weights.npz"
    written.unlink(missing_ok=True)
    server = secure_server_app if plan.secure else server_app
    client = secure_client_app if plan.secure else client_app
    processes = {"num_cpus": min(plan.clients, os.cpu_count() or 1), "include_dashboard": False}
    backend: Any = {"init_args": processes, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server(folder, plan), client(folder), plan.clients, backend_config=backend)
    if not written.is_file():
        raise UnusableError("no round came to its end; the lines above say why")


def worth_saying(record: logging.LogRecord) -> bool:
    """Errors, and what a client answers that failed, which Flower tells among all else."""
    return record.levelno >= logging.ERROR or "Received error in reply" in str(record.msg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--verbose", action="store_true", help="show what Flower logs")
    for field in fields(Plan):
        flag = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    given = vars(parser.parse_args())
    folder, verbose = given.pop("folder").resolve(), given.pop("verbose")
    if not verbose:
        logging.getLogger("flwr").addFilter(worth_saying)
    warnings.simplefilter("default" if verbose else "ignore")
    try:
        simulate(folder, Plan(**given))
    except UnusableError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
