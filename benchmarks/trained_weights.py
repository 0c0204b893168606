"""The tensors that a step trains by default, in exports of many architectures: right, wrong and missing ones.

    python benchmarks/trained_weights.py torch --only 'timm/*' > torch.jsonl    # also torch-legacy, keras, jax, sklearn
    python benchmarks/trained_weights.py --read torch.jsonl keras.jsonl         # the table, and what to read

The networks (``exported_networks.py``) have small random weights, and nothing is downloaded. A tensor is rightly
trained if the network's own library calls it trainable. All its numbers are drawn anew, so they identify a tensor of
the file, also where it is turned, joined or split. One line of JSON comes for each architecture. If fewer than 99 % of
a trained tensor's numbers are a parameter's, it is ``wrong`` if a buffer has them, and ``computed`` if nobody has: it
was folded from parameters, or is a constant. A parameter is ``missing`` if fewer than 99 % of its numbers are in
trained tensors. Each of these wants an explanation.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from exported_networks import EXPORTERS

LIMIT = 240  # seconds for one architecture


# --- what is trained, against the truth ----------------------------------------------------------------------


def judged(model: onnx.ModelProto, parameters: dict[str, Any], constants: dict[str, Any]) -> dict[str, Any]:
    """The lists for one file."""
    from gradgraph.autodiff.path import carries
    from gradgraph.autodiff.review import reasons, review
    from gradgraph.autodiff.select import trainable
    from gradgraph.passes.normal import normalise

    start = time.perf_counter()
    graph = normalise(model).graph
    targets = [v for v in graph.outputs if carries(v)]
    trained = {v.name or "": v.const_value.numpy() for v in trainable(graph, targets) if v.const_value is not None}
    why = reasons(graph, targets)
    findings = [str(f) for f in review(graph, targets, list(trained))]
    seconds = time.perf_counter() - start
    learned, fixed, stored = numbers(parameters), numbers(constants), numbers(trained)
    foreign = {n: a for n, a in trained.items() if share(a, learned) < 0.99 and n not in parameters}
    wrong = [n for n, a in foreign.items() if share(a, fixed) >= 0.99 or n in constants]
    missing = [n for n, a in parameters.items() if n not in trained and share(a, stored) < 0.99]
    return {
        "parameters": len(parameters),
        "trained": len(trained),
        "wrong": [line(n, trained[n], why) for n in wrong],
        "computed": [line(n, a, why) for n, a in foreign.items() if n not in wrong],
        "missing": [f"{n} {list(np.shape(parameters[n]))}" for n in missing],
        "untrained": dict(Counter(kind(words) for n, words in why.items() if n not in trained)),
        "findings": findings,
        "seconds": round(seconds, 2),
    }


def numbers(tensors: dict[str, Any]) -> np.ndarray:
    return np.unique(np.concatenate([np.ravel(a).astype(np.float32) for a in tensors.values()] or [np.zeros(0)]))


def share(array: Any, known: np.ndarray) -> float:
    """The share of numbers that are known; of many, a sample tells."""
    flat = np.ravel(array).astype(np.float32)
    return float(np.isin(flat[:: 1 + flat.size // 20_000], known).mean()) if flat.size else 1.0


def line(name: str, array: Any, why: dict[str, str]) -> str:
    return f"{name} {list(np.shape(array))}: {why.get(name, '')}"


def kind(words: str) -> str:
    """A reason without the names in it."""
    return words.split(" of node")[0].split(" (node")[0] + (" ?" if words.endswith("learned one") else "")


# --- the run, and the table -------------------------------------------------------------------------------------


def sweep(exporter: str, only: str) -> None:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {LIMIT} s")

    signal.signal(signal.SIGALRM, stop)
    for name, export in EXPORTERS[exporter]():
        if not fnmatch.fnmatch(name, only):
            continue
        signal.alarm(LIMIT)
        try:
            found = judged(*export())
        except Exception as error:  # not every network is exported by every exporter
            found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        finally:
            signal.alarm(0)
        print(json.dumps({"exporter": exporter, "name": name, **found}), flush=True)


def read(paths: list[Path]) -> None:
    rows = [json.loads(text) for path in paths for text in path.read_text().splitlines() if text[:1] == "{"]
    for row in rows:
        for key in ("failed", "wrong", "computed", "missing", "findings"):
            if row.get(key):
                print(f"{row['exporter']} {row['name']} {key}: {row[key]}")
    print(
        f"{'exporter':14}{'networks':>9}{'trained':>9}{'wrong':>7}{'computed':>9}{'parameters':>11}{'missing':>8}{'failed':>7}"
    )
    for exporter in dict.fromkeys(row["exporter"] for row in rows):
        mine = [r for r in rows if r["exporter"] == exporter]
        good = [r for r in mine if "failed" not in r]
        sums = [sum(r[k] if isinstance(r[k], int) else len(r[k]) for r in good)
                for k in ("trained", "wrong", "computed", "parameters", "missing")]  # fmt: skip
        widths = (9, 9, 7, 9, 11, 8, 7)
        cells = (len(good), *sums, len(mine) - len(good))
        print(f"{exporter:14}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exporter", nargs="?", choices=EXPORTERS)
    parser.add_argument("--only", default="*", help="a glob of names")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="print the table of earlier runs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.read:
        read(arguments.read)
    elif arguments.exporter:
        sweep(arguments.exporter, arguments.only)
    else:
        sys.exit(parser.format_usage())


if __name__ == "__main__":
    main()
