"""Makes a page that trains a network on digits by a step in C, compiled to WebAssembly, and serves it.

Run with ``python -m examples.wasm``. It needs a Clang with headers of WASI, such as Zig's (``make runtimes``, or
``pip install ziglang``); no npm. The network is that of ``examples.web``, without dropout, whose random numbers need
large tables.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import gradgraph as gg
from examples.web.__main__ import make_digits_file, write_and_serve
from gradgraph import frontend
from gradgraph.cli.digits import DigitNet

HERE = Path(__file__).parent
ZIG = HERE.parents[1] / ".venv-runtimes" / "zig" / "bin" / "python"
BATCH = 32


def make_site(folder: Path) -> None:
    """Write the page, the module, its first weights, and the digits."""
    frontend.manual_seed(0)
    net = DigitNet()
    net.head[1].p = 0.0
    model = frontend.export(net, {"x": (BATCH, 1, 8, 8)}, outputs=["logits"])
    source = folder / "c"
    folder.mkdir(parents=True, exist_ok=True)
    gg.export.c(gg.build(model, "cross_entropy", gg.optim.adamw(1e-3), seed=0), source, force=True)
    compile_module(source)
    digits = [HERE.parent / "web" / "page" / name for name in ("digits.js", "drawing.js")]
    for path in (HERE / "index.html", *HERE.glob("*.js"), *digits, source / "state.bin", source / "manifest.json"):
        shutil.copy(path, folder)
    (source / "trainer.wasm").replace(folder / "trainer.wasm")
    make_digits_file(folder)


def compile_module(folder: Path) -> None:
    """Compile ``trainer.wasm`` by the command in README.md, without weights."""
    (command,) = re.findall(r"^    python (-m ziglang cc .*)$", (folder / "README.md").read_text(), re.MULTILINE)
    python = ZIG if ZIG.exists() else sys.executable
    subprocess.run([python, *command.split(), "-DTRAINER_NO_WEIGHTS"], cwd=folder, check=True)


if __name__ == "__main__":
    write_and_serve("wasm", __doc__, make_site)
