"""Export of a workload: all files from which the libraries start, in one folder.

    python -m benchmarks.prepare resnet18 build/benchmarks/resnet18 [--dynamic]

- ``model.onnx``: PyTorch's exporter, inference form, all names kept; static sizes, or a dynamic batch.
- ``batch.npz``: the batch.
- ``weights.npz``: the parameters under PyTorch's names; not for real sizes.
- ``training.onnx``: PyTorch's older exporter, opset 17, batch normalization in training mode; not for real sizes.
- ``facts.json``: operations of a forward pass, number of parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch

from benchmarks import networks
from benchmarks.flops import forward_flops
from benchmarks.workloads import ALL, REAL
from gradgraph.files.models import load_model, to_proto
from gradgraph.frontend import from_torch
from gradgraph.passes.normal import normalise

SOURCES = ("networks.py", "real_networks.py", "workloads.py", "prepare.py", "flops.py")
OLD_OPSET = 17  # the newest that every library reads


def export(name: str, folder: Path, dynamic: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    network, batch = networks.make(name), ALL[name].batch()
    names = list(ALL[name].inputs)
    inputs = tuple(torch.from_numpy(batch[n]) for n in names)
    static = from_torch(network, inputs, input_names=names, output_names=["logits"], dynamic={})
    model = from_torch(network, inputs, input_names=names, output_names=["logits"]) if dynamic else static
    onnx.save(model, folder / "model.onnx")
    _save_arrays(folder / "batch.npz", batch)
    if name not in REAL:  # real sizes are compared only with PyTorch
        _save_arrays(folder / "weights.npz", {name: p.detach().numpy() for name, p in network.named_parameters()})
        _export_in_training_form(network, inputs, folder / "training.onnx")
    facts = {
        "flops": forward_flops(to_proto(normalise(load_model(static)))),
        "parameters": sum(p.numel() for p in network.parameters()),
        "made_by": fingerprint(dynamic),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # a parameter called allow_pickle would be one


def fingerprint(dynamic: bool) -> str:
    """Return a digest of all that affects the exports: a folder with this digest is up to date."""
    content = b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)
    return hashlib.sha256(content + f"{torch.__version__} {dynamic}".encode()).hexdigest()


def up_to_date(folder: Path, dynamic: bool) -> bool:
    facts = folder / "facts.json"
    return facts.exists() and json.loads(facts.read_text()).get("made_by") == fingerprint(dynamic)


def _export_in_training_form(network: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> None:
    """Write ``training.onnx``, unless the older exporter fails."""
    buffer = io.BytesIO()
    path.unlink(missing_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(
                network,
                inputs,
                buffer,
                dynamo=False,
                training=torch.onnx.TrainingMode.TRAINING,
                do_constant_folding=False,
                opset_version=OLD_OPSET,
                input_names=["x"],
                output_names=["logits"],
            )
        except Exception as problem:  # of any class; libraries then report that there is no model
            print(f"no training.onnx: {problem}")
            return
    path.write_bytes(buffer.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=ALL)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dynamic", action="store_true", help="leave the batch size open in model.onnx")
    arguments = parser.parse_args()
    if not up_to_date(arguments.folder, arguments.dynamic):
        export(arguments.workload, arguments.folder, arguments.dynamic)


if __name__ == "__main__":
    main()
