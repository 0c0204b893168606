"""Compile exported C with the system's compiler, and call it by ctypes."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
ZIG = Path(__file__).parents[2] / ".venv-runtimes" / "zig" / "bin" / "python"  # with Clang for many systems
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-ffp-contract=off")
CHECKED = ("-fsanitize=undefined", "-fsanitize-undefined-trap-on-error")


def compiler(*arguments: str | Path) -> None:
    """Run the compiler, and fail with its messages."""
    assert COMPILER is not None
    ran = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:4000]


class Program:
    """The functions of an exported folder; ``memory`` is the state and the arena of one trainer."""

    def __init__(self, folder: Path, name: str = "trainer", flags: tuple[str, ...] = CHECKED) -> None:
        self.folder, self.name = folder, name
        library = folder / f"{name}.so"
        compiler(*STRICT, "-O1", *flags, "-shared", "-fPIC", folder / f"{name}.c", "-o", library, "-lm")
        self._library = ctypes.CDLL(str(library))
        facts = json.loads((folder / "manifest.json").read_text())
        self.state = facts["state"]
        room = facts["state_bytes"] + facts["arena"] + 64 * (len(self.state) + 2)  # with padding between fields
        self.memory = np.zeros(-(-room // 8), np.int64)
        header = (folder / f"{name}.h").read_text()
        self._signatures = dict(re.findall(rf"^int {name}_(\w+)\((.*)\);", header, re.MULTILINE))
        self._library[f"{name}_init"](self._address(self.memory))

    @staticmethod
    def _address(array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data)

    def call(self, function: str, *arguments: Any) -> int:
        """Call a function with arrays, and numbers for arguments that are not pointers; return its result."""
        types = [text.strip() for text in self._signatures[function].split(",")[1:]]
        assert len(types) == len(arguments), types
        passed = []
        for text, value in zip(types, arguments, strict=True):
            if value is None:
                passed.append(ctypes.c_void_p(None))
            elif "*" in text:
                assert value.flags.c_contiguous
                passed.append(self._address(value))
            else:
                passed.append(ctypes.c_float(value) if text.startswith("float") else ctypes.c_int64(value))
        return int(self._library[f"{self.name}_{function}"](self._address(self.memory), *passed))

    def save(self) -> np.ndarray:
        bytes_ = np.zeros(
            12 + sum(int(np.prod(s["shape"])) * np.dtype(s["dtype"]).itemsize for s in self.state), np.uint8
        )
        self._library[f"{self.name}_save"](self._address(self.memory), self._address(bytes_))
        return bytes_

    def load(self, saved: np.ndarray) -> int:
        return int(self._library[f"{self.name}_load"](self._address(self.memory), self._address(saved)))

    def values(self) -> dict[str, np.ndarray]:
        """Return the state by name, from the saved bytes."""
        saved, found = self.save(), {}
        for entry in self.state:
            size = int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize
            part = saved[entry["saved_at"] : entry["saved_at"] + size]
            found[entry["name"]] = part.view(entry["dtype"]).reshape(entry["shape"])
        return found
