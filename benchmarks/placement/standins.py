"""Stand-ins for the libraries of CUDA, so that onnxruntime-gpu starts without a GPU; results are garbage.

Every function that onnxruntime requires does nothing and reports success, except a few in ``standins/*.cc``. The list
of functions is read from the provider itself, so that it matches onnxruntime's version.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent / "standins"
LOADED_LATER = {"cudnn": "libcudnn.so.9", "cufft": "libcufft.so.12"}  # by dlopen, unknown to the linker
PROVIDERS = ("cuda", "tensorrt")
OURS = r"lib(?:cu|nv)\S+"
UNVERSIONED = {  # libraries of functions without a symbol version, by the beginning of their names
    "cu[A-Z]": "libcuda.so.1",
    "createNvOnnx": "libnvonnxparser.so.10",
    "createInfer|getInfer|getPlugin": "libnvinfer.so.10",
}


def compiled(packages: Path, folder: Path) -> None:
    """Write the libraries to ``folder``.

    Args:
        packages: site-packages with onnxruntime-gpu, nvidia-cuda-runtime and nvidia-cuda-crt.
        folder: the output folder.

    Raises:
        subprocess.CalledProcessError: g++, nm or readelf fails.
    """
    (includes,) = packages.glob("nvidia/cu*/include")
    folder.mkdir(parents=True, exist_ok=True)
    for library, names in wanted(packages / "onnxruntime" / "capi").items():
        source = folder / f"{library}.cc"
        own = HERE / f"{library.removeprefix('lib').split('.')[0]}.cc"
        source.write_text(do_nothing(names, own.read_text() if own.exists() else ""))
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        command = ["g++", "-shared", "-fPIC", "-O1", "-w", f"-I{includes}", f"-Wl,-soname,{library}"]
        objects = [str(source), *([str(own)] if own.exists() else [])]
        subprocess.run(
            [*command, f"-Wl,--version-script={versions}", *objects, "-o", str(folder / library)], check=True
        )


def wanted(folder: Path) -> dict[str, set[str]]:
    """Return the functions that the providers in ``folder`` import, by library.

    TensorRT's provider is included because onnxruntime also loads it before it lists its kernels.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for name in PROVIDERS:
        provider = folder / f"libonnxruntime_providers_{name}.so"
        for library in re.findall(rf"\[({OURS})\]", _output("readelf", "-d", str(provider))):
            found[library] |= set()
        listed = _output("nm", "-D", "--undefined-only", "--with-symbol-versions", str(provider))
        for function, library in re.findall(rf"\bU (\w+)(?:@({OURS}))?$", listed, re.MULTILINE):
            home = library or next((home for start, home in UNVERSIONED.items() if re.match(start, function)), None)
            if home:
                found[home].add(function)
        content = provider.read_bytes()
        for start, library in LOADED_LATER.items():
            names = re.findall(rb"\0(%s[A-Z]\w+)(?=\0)" % start.encode(), content)
            found[library] |= {function.decode() for function in names}
    return dict(found)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def do_nothing(names: Iterable[str], written: str) -> str:
    """Return C++ code for the functions that ``written`` does not define; constructors return a handle."""
    lines = ["static char handle[4096];", 'extern "C" {']
    for name in sorted(names):
        if re.search(rf"\b{name}\(", written):
            continue
        body = "return *out = handle, 0;" if re.match("cu.*Create", name) else "return 0;"
        lines.append(f"long {name}(void** out) {{ {body} }}")
    return "\n".join([*lines, "}", ""])
