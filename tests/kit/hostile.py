"""Hostile contents of files, and hostile values of fields in documents, which readers must reject or survive."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MEGA = 1 << 20


def _zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def _tarred(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def _npy(header: str, content: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    size = (len(header) if length is None else length).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header.encode() + content


def _safetensors(header: bytes, length: int | None = None, content: bytes = b"") -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + content


def _pickled() -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([{}], dtype=object))
    return out.getvalue()


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }" % (1 << 60)
FAR = b'{"w": {"dtype": "F32", "shape": [%d], "data_offsets": [0, %d]}}'

# contents that are not valid for any reader
CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "a letter": b"Dear reader,\nthis is no file of yours.\n",
    "zeros": bytes(1000),
    "bytes": bytes(range(256)) * 4,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf",
    "half a character": b'{"a": "\\ud800", "\\udfff": [1]}',
    "nested lists": b"[" * MEGA,
    "nested lists that end": b"[" * 100_000 + b"]" * 100_000,
    "nested tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "nested tables of TOML": b"a = " + b"{a=" * 100_000,
    "a key of many parts": b"a." * 100_000 + b"a = 1",
    "a quoted key of many parts": b'"a" . ' * 100_000 + b"a = 1",
    "a number of a million digits": b'{"a": ' + b"9" * MEGA + b"}",
    "a fraction of a million digits": b'{"a": 0.' + b"9" * MEGA + b"e999999999}",
    "a number of TOML of a million digits": b"a = " + b"9" * MEGA,
    "NaN": b'{"a": NaN}',
    "Infinity": b"[Infinity, -Infinity]",
    "1e999": b'{"a": 1e999}',
    "a key twice": b'{"a": 1, "a": 2}',
    "many keys twice": b"{" + b",".join(b'"%d": 0' % (i // 2) for i in range(200_000)) + b"}",
    "null": b"null",
    "true": b"true",
    "a list": b"[1, 2, 3]",
    "text": b'"text"',
    "a long text": b'"' + b"a" * (4 * MEGA) + b'"',
    "tables in a list": b"[{}, [], 1, null]",
    "a pickle": pickle.dumps({"a": np.ones(3)}),
    "a pickled array": _pickled(),
    "gzip": gzip.compress(b"{}" * 1000),
    "a bomb of gzip": gzip.compress(bytes(128 * MEGA)),
    "a bomb of zlib": zlib.compress(bytes(128 * MEGA)),
    "a zip of text": _zipped({"a.txt": b"text"}),
    "an empty zip": _zipped({}),
    "a zip that leads out": _zipped({"../../a.npy": _npy("{}")}),
    "an array of 2**60": _zipped({"x.npy": _npy(HUGE)}),
    "a bomb of a header": _zipped({"x.npy": _npy("{" + " " * (128 * MEGA), version=2)}),
    "a header of nesting": _zipped({"x.npy": _npy("(" * 9000)}),
    "a header of signs": _zipped({"x.npy": _npy("-" * 9000 + "1")}),
    "a pickle in a zip": _zipped({"x.npy": _pickled()}),
    "many members": _zipped({f"{i}.npy": b"" for i in range(20_000)}),
    "half a zip": _zipped({"x.npy": bytes(1000)})[:-30],
    "an array": _npy(HUGE),
    "a header without an end": _npy("{", version=2, length=0xFFFF_FFFF),
    "a header beyond the file": _safetensors(b"{}", 1 << 62),
    "a header of safetensors that is no JSON": _safetensors(b"{" * 1000),
    "tensors beyond the file": _safetensors(FAR % (1 << 40, 1 << 42)),
    "a shape beyond its bytes": _safetensors(FAR % (1 << 62, 4), content=bytes(4)),
    "nested headers": _safetensors(b'{"a":' * 100_000),
    "a tar of a letter": _tarred({"0.txt": b"text"}),
    "a tar that leads out": _tarred({"../../a.npy": b"text"}),
    "half a tar": _tarred({"0.npy": bytes(5000)})[:3000],
    "protobuf without an end": b"\x3a\xff\xff\xff\xff\x0f" + bytes(100),
    "nested protobuf": b"\x3a\x7f" * 10_000,
}

# things at a path that are not regular files
PLACES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("missing")),
}

# values that replace any field of a well formed document
VALUES: dict[str, str] = {
    "null": "null",
    "true": "true",
    "a list": "[]",
    "a table": "{}",
    "text": '"text"',
    "no text": '""',
    "half a character": '"\\ud800"',
    "a name that steers": '"\\u001b[2J\\u202e"',
    "a long text": '"' + "a" * 100_000 + '"',
    "-1": "-1",
    "a fraction": "0.5",
    "NaN": "NaN",
    "Infinity": "-Infinity",
    "1e999": "1e999",
    "a hundred digits": "9" * 100,
    "ten thousand digits": "9" * 10_000,
    "a list of lists": "[[[1]]]",
    "a list of tables": "[{}]",
    "a list of numbers": "[1, 2]",
    "a list of nulls": "[null]",
    "deep lists": "[" * 900 + "]" * 900,
    "deeper lists": "[" * 5000 + "]" * 5000,
    "a key twice": '{"a": 1, "a": 2}',
}


def fields_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every field in a document, and of the document itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in fields_of(one, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of a document with ``new`` at ``path``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy
