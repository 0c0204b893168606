"""Onnxruntime-node, by the example that trains in Node.js."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from feeding import read_batches

EXAMPLE = Path(__file__).parents[2] / "examples" / "node" / "train.mjs"

if __name__ == "__main__":
    batches = read_batches(Path(sys.argv[2]))
    listed = [{n: {"dims": v.shape, "data": v.ravel().tolist()} for n, v in batch.items()} for batch in batches]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "batches.json").write_text(json.dumps(listed))
        command = ["node", str(EXAMPLE), sys.argv[1], f"{folder}/batches.json"]
        sys.exit(subprocess.run(command, check=False).returncode)
