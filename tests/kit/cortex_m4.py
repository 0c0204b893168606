"""Compile exported C for a Cortex-M4, and run it on an emulated board."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

BOARD = Path(__file__).parent / "board"
GCC, QEMU = shutil.which("arm-none-eabi-gcc"), shutil.which("qemu-system-arm")
NEEDS_BOARD = pytest.mark.skipif(
    GCC is None or QEMU is None,
    reason="there is no Cortex-M4: apt-get install qemu-system-arm gcc-arm-none-eabi libnewlib-arm-none-eabi",
)
PROCESSOR = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")
SECTIONS = ("-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections")
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-ffp-contract=off")


def built(folder: Path, main: str, optimize: str = "-O2", name: str = "trainer") -> Path:
    """Compile an exported folder with the C source of a ``main``; return the program."""
    assert GCC is not None
    source, program = folder / "board_main.c", folder / "board.elf"
    source.write_text(main)
    objects = []
    for path, flags in ((folder / f"{name}.c", STRICT), (source, ()), (BOARD / "start.c", ())):
        objects.append(folder / f"board_{path.stem}.o")
        _run(GCC, *PROCESSOR, optimize, *SECTIONS[:2], *flags, f"-I{folder}", "-c", path, "-o", objects[-1])
    link = ("-nostartfiles", "--specs=nosys.specs", SECTIONS[2], "-T", BOARD / "memory.ld")
    _run(GCC, *PROCESSOR, optimize, *link, *objects, "-lm", f"-Wl,-Map={folder / 'board.map'}", "-o", program)
    return program


def _run(*command: str | Path) -> str:
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[:4000]
    return ran.stdout + ran.stderr


def output_of(program: Path) -> str:
    """Run a program on the board; return the text that it prints."""
    assert QEMU is not None
    machine = ("-M", "mps2-an386", "-nographic", "-monitor", "none", "-serial", "none")
    return _run(QEMU, *machine, "-semihosting-config", "enable=on,target=native", "-kernel", program)


def section_sizes(program: Path) -> dict[str, int]:
    """Return the sizes of the sections of a program, in bytes: .text, .rodata, .data and .bss."""
    text = _run("arm-none-eabi-size", "-A", program)
    return {name: int(size) for name, size in re.findall(r"^(\.\w+)\s+(\d+)", text, re.MULTILINE)}


def code_sizes(program: Path) -> dict[str, int]:
    """Return the sizes of the functions of the exported file in a linked program."""
    text = (program.parent / "board.map").read_text().split("Linker script and memory map")[1]
    found = re.findall(r"^ \.text\.(\S+)\s+0x\w+\s+0x(\w+) \S*board_(?:trainer|net)\w*\.o$", text, re.MULTILINE)
    return {name: int(size, 16) for name, size in found}


def main_of(
    batches: Sequence[Mapping[str, np.ndarray]], rates: Sequence[float], results: Sequence[str], loss: str
) -> str:
    """Return a ``main`` that trains on ``batches`` and prints the bits of each loss."""
    lines = ['#include "trainer.h"', "#include <stddef.h>", "#include <string.h>", "void print(const char *text);"]
    for name, first in batches[0].items():
        kind = {"float32": "float", "int64": "int64_t"}[str(first.dtype)]
        rows = ",\n".join("{" + ", ".join(map(_literal, batch[name].ravel())) + "}" for batch in batches)
        lines.append(f"static const {kind} {name}[{len(batches)}][{first.size}] = {{{rows}}};")
    inputs = [f"{name}[i]" if first.shape else f"{name}[i][0]" for name, first in batches[0].items()]
    passed = [*inputs, *(f"{rate!r}f" for rate in rates), *("&loss" if r == loss else "NULL" for r in results)]
    return "\n".join([*lines, "static trainer_t trainer;", f"""
int main(void) {{
    trainer_init(&trainer);
    for (int i = 0; i < {len(batches)}; i++) {{
        float loss = 0;
        uint32_t bits;
        char text[10] = "00000000\\n";
        if (trainer_step(&trainer, {", ".join(passed)}) != TRAINER_OK) return 1;
        memcpy(&bits, &loss, 4);
        for (int k = 0; k < 8; k++) text[k] = "0123456789abcdef"[(bits >> (28 - 4 * k)) & 15];
        print(text);
    }}
    return 0;
}}
"""])  # fmt: skip


def _literal(value: np.generic) -> str:
    return f"{float(value).hex()}f" if value.dtype.kind == "f" else str(int(value))


def losses(printed: str) -> np.ndarray:
    """Return the losses that a ``main`` of ``main_of`` printed."""
    return np.array([int(line, 16) for line in printed.split()], np.uint32).view(np.float32)
