"""What anybody may have written is read in one room: no other file of the package calls a reader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = "gradgraph/files/untrusted/"
# calls that read what anybody may have written: the ends of their names
READERS = {
    "json.load", "json.loads", "tomllib.load", "tomllib.loads", "pickle.load", "pickle.loads", "marshal.loads",
    "np.load", "np.fromfile", "np.memmap", "np.genfromtxt", "np.loadtxt", "npy.read_array", "npy.read_magic",
    "npy.read_array_header_1_0", "ZipFile", "tarfile.open", "gzip.open", "gzip.decompress", "bz2.open", "lzma.open",
    "zlib.decompress", "zlib.decompressobj", "csv.reader", "csv.DictReader", "safe_open", "load_file", "onnx.load",
    "onnx.load_model", "onnx.load_from_string", "ModelProto.FromString", "ParseFromString", "ir.load", "Image.open",
    "literal_eval", "yaml.load", "yaml.safe_load", "read_bytes", "read_text", "os.open",
}  # fmt: skip
_FOR_READING = 'open("rb")'
ELSEWHERE = {
    ("backends/capability.py", "read_text"): "a table of this package",
    ("backends/capability.py", "tomllib.loads"): "a table of this package",
    ("backends/ort_native/flags.py", "read_bytes"): "sources of this package",
    ("export/pages.py", "read_text"): "parts of this package",
    ("export/c/c_text.py", "read_text"): "sources of this package",
    ("cli/explain.py", "ZipFile"): "an archive that is written to memory",
    ("cli/choices.py", "read_text"): "names that this package has written beside it",
    ("export/ort_format.py", "read_bytes"): "what onnxruntime has just written to a folder of ours",
    ("export/ort_format.py", "read_text"): "what onnxruntime has just written to a folder of ours",
    ("surgery/ort_adapters.py", "read_bytes"): "what onnxruntime has just written to a folder of ours",
    ("runtime/execution/profiler.py", "read_bytes"): "what onnxruntime has just written to a folder of ours",
    ("surgery/calibrated_model.py", "onnx.load"): "what onnxruntime has just written to a folder of ours",
    ("runtime/execution/opener.py", "onnx.load"): "what onnxruntime has just written to a folder of ours",
    ("files/models.py", _FOR_READING): "the model that it has just written",
    ("files/models.py", "ModelProto.FromString"): "the model that it has just written",
    ("runtime/execution/regions.py", "read_text"): "what the kernel says of memory",
    ("runtime/loop/logs.py", "read_text"): "what the kernel says of memory",
    ("machine/free_memory.py", "read_text"): "what the kernel says of memory",
    ("machine/limits.py", "read_text"): "what the kernel says of memory",
    ("machine/hardware.py", "read_text"): "what the kernel says of the processor",
    ("cli/build.py", "json.loads"): "the manifest that it has just written",
    ("cli/inspect.py", "json.loads"): "the manifest that it has just written",
    ("cli/app.py", "os.open"): "the null device, in place of a closed stream",
    ("cli/predictions.py", _FOR_READING): "a file that it has just written",
    ("runs/run_folder.py", _FOR_READING): "a regular file that the run has read",
    ("reduction/submodels.py", "json.loads"): "what a process of ours answers",
    ("reduction/observer.py", "json.loads"): "what a process of ours answers",
    ("reduction/observer.py", "onnx.load"): "a model that this process's parent has just written",
    ("files/spilled.py", "np.memmap"): "a file that it has just written",
    ("files/atomic.py", "os.open"): "a folder, to have its names written",
    ("files/external.py", _FOR_READING): "a file that was found to be a regular one as the model was read",
    ("data/arrays/stored.py", "os.open"): "a file whose header was read from a regular one",
    ("runtime/saved/lock.py", "os.open"): "a lock of ours, whose content nobody reads",
    ("arguments.py", "literal_eval"): "words that a user types",
    ("cli/predictions.py", "ZipFile"): "it is written",
    ("data/images/image_files.py", "Image.open"): "the one decoder of images, of common formats only",
    ("compat/onnxruntime_training/saved/checkpoint_file.py", "np.memmap"): "plain bytes beside a checkpoint",
    ("compat/onnxruntime_training/saved/checkpoint_file.py", "read_bytes"): "a flatbuffer, which has a reader there",
}


def name_of(function: ast.expr) -> str:
    """The name of what is called: ``json.loads``; of what is no name, its last words."""
    match function:
        case ast.Name(name):
            return name
        case ast.Attribute(value, name):
            return f"{name_of(value)}.{name}"
    return ""


def readers_in(path: Path) -> Iterator[str]:
    """The readers that a module calls."""
    text = path.read_text(encoding="utf-8")
    if not any(r.rpartition(".")[2] in text for r in (*READERS, '"rb"')):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = name_of(node.func)
            yield from (r for r in READERS if f".{name}".endswith(f".{r}"))
            if name.endswith("open") and any(isinstance(a, ast.Constant) and a.value == "rb" for a in node.args):
                yield _FOR_READING


@pytest.mark.sweep(0)
def test_what_anybody_may_have_written_is_read_in_one_room() -> None:
    found = set()
    for path in sorted(p for top in ("gradgraph", "cli", "export", "frontend") for p in (ROOT / top).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(ROOM):
            found |= {(name.removeprefix("gradgraph/"), reader) for reader in readers_in(path)}
    assert found - ELSEWHERE.keys() == set(), f"read it by a function of {ROOM}, or say here why it need not be"
    assert ELSEWHERE.keys() - found == set(), "no such call any more"
