"""A client that trains in JavaScript: Flower speaks Python, so a process of Node.js is driven over its pipes."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from step_folder import Arrays, UnusableError

PROGRAM = Path(__file__).parents[1] / "node" / "federated_client.mjs"


class NodeClient:
    """``examples/node/federated_client.mjs`` with a step folder and the data of one client; a line of JSON a round."""

    def __init__(self, step: Path, data: Path) -> None:
        command = ["node", str(PROGRAM), str(step), str(data)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            raise UnusableError("Node.js is not installed; leave --node out, or install it and run make node") from None

    def train(
        self, weights: Mapping[str, np.ndarray], batches: Iterable[np.ndarray], proximal: float = 0.0
    ) -> tuple[Arrays, float]:
        """As ``StepFolder.train``: the rows of each batch are numbers in the client's own files."""
        sent = {name: base64.b64encode(value.astype("<f4").tobytes()).decode() for name, value in weights.items()}
        told = {"weights": sent, "batches": [rows.tolist() for rows in batches], "proximal": proximal}
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(told) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise UnusableError("the process of Node.js has ended; run make node, then see what it wrote above")
        answer = json.loads(line)
        if "error" in answer:
            raise UnusableError(f"in Node.js: {answer['error']}")
        numbers = {name: np.frombuffer(base64.b64decode(text), "<f4") for name, text in answer["weights"].items()}
        return {name: numbers[name].reshape(weights[name].shape) for name in weights}, float(answer["loss"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
