"""gradgraph.js finds the class of a label as Python does: all cases of tests/data/record/test_classes.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.record.test_classes import ANIMALS, MATCHED, REFUSED, STARS

pytestmark = [pytest.mark.node, pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")]

LIBRARY = Path(__file__).parents[2] / "examples" / "web" / "classes.js"
SPEC = {"name": "target", "shape": ["n"], "dtype": "int64", "classes": 3, "ignore_index": -100}


def said(script: str) -> list[Any]:
    code = f"import {{ asNumbers, numbersOf }} from {json.dumps(LIBRARY.as_uri())};{script}"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code], capture_output=True, text=True, timeout=60, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_labels_have_the_numbers_that_they_have_in_python() -> None:
    cases = [*((*case[:2], case[2]) for case in MATCHED), *((known, labels, None) for known, labels, _ in REFUSED)]
    plain = [np.array(labels, object).tolist() for _, labels, _ in cases]
    kept = [i for i, labels in enumerate(plain) if not any(one is None or one != one for one in labels)]
    data = [[{"names": cases[i][0].names, "numbered": cases[i][0].numbered},
             [one.item() if isinstance(one, np.generic) else one for one in plain[i]]] for i in kept]  # fmt: skip
    found = said(
        f"for (const [classes, labels] of {json.dumps(data)}) {{ let found; "
        f"try {{ found = numbersOf({json.dumps(SPEC)}, classes, labels); }} "
        "catch (error) { found = error.message; } console.log(JSON.stringify(found)); }"
    )
    for i, one in zip(kept, found, strict=True):
        known, labels, numbers = cases[i]
        assert one == numbers if numbers is not None else isinstance(one, str), (known, labels, one)


def test_what_is_fed_to_a_target_of_labels() -> None:
    """Names, and numbers that are names; numbers of classes, pixels and inputs stay as they are."""
    of = lambda classes: {"targets": [SPEC], "data": {"classes": {"target": classes}}}  # noqa: E731
    pixels = {**SPEC, "shape": ["n", 2, 2]}
    cases = [
        (of(ANIMALS), SPEC, "['emu', 'cat']", [2, 0]),
        (of(STARS), SPEC, "new BigInt64Array([3n, 1n])", [2, 0]),
        (of(STARS), SPEC, "{ data: [3, 1], dims: [2] }", {"data": [2, 0], "dims": [2]}),
        ({"targets": [SPEC]}, SPEC, "[2, 0]", [2, 0]),
        (of(STARS), pixels, "[[[1, 2], [0, 1]]]", [[[1, 2], [0, 1]]]),
        (of(STARS), {**SPEC, "name": "x"}, "[3, 1]", [3, 1]),
    ]
    calls = (f"console.log(JSON.stringify(asNumbers({json.dumps(manifest)}, {json.dumps(spec)}, {value})));"
             for manifest, spec, value, _ in cases)  # fmt: skip
    assert said("".join(calls)) == [wanted for *_, wanted in cases]
