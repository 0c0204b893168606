"""Mutations that know the structure of what they change: protobuf messages, JSON, headers and names of arrays."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    0,
    1,
    1,
    2,
    3,
    4,
    7,
    16,
    100,
    2**15,
    2**31 - 1,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
WORDS = (
    *(
        "",
        "x0",
        "y0",
        "é",
        "\x1b[31m",
        "\u202e",
        "../../etc/passwd",
        "/dev/zero",
        "a" * 5000,
        "ij,jk->ik",
        "SAME_UPPER",
    ),
    *("Split", "Loop", "Einsum", "Reshape", "ConstantOfShape", "ai.onnx", "ai.onnx.ml", "com.microsoft", "own"),
)
_WHOLE = {FieldDescriptor.TYPE_INT64: 2**63, FieldDescriptor.TYPE_UINT64: 2**64, FieldDescriptor.TYPE_INT32: 2**31}


# --- protobuf -----------------------------------------------------------------------------------------


def mutated_message(message: Message, donor: Message, rng: random.Random) -> None:
    """Change one to four fields of ``message`` in place; parts of ``donor`` may be put in."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        places = list(_messages(message))
        _mutate(rng.choice(places), list(_messages(donor)) if rng.random() < 0.5 else places, rng)


def _messages(root: Message) -> Iterator[Message]:
    stack = [root]
    while stack:
        top = stack.pop()
        yield top
        for field, content in top.ListFields():
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                stack.extend(content if _repeats(field) else [content])


def _repeats(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _mutate(message: Message, others: Sequence[Message], rng: random.Random) -> None:
    present = [field for field, _ in message.ListFields()]
    field = rng.choice(present) if present and rng.random() < 0.8 else rng.choice(message.DESCRIPTOR.fields)
    alike = [m for m in others if m.DESCRIPTOR.full_name == message.DESCRIPTOR.full_name and m is not message]
    if rng.random() < 0.15 or (alike and rng.random() < 0.1):
        message.ClearField(field.name)
    elif alike and rng.random() < 0.3:
        _take(message, _copy(rng.choice(alike)), field, rng)
    elif _repeats(field):
        _mutate_list(getattr(message, field.name), field, others, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        found = [m for m in others if m.DESCRIPTOR.full_name == field.message_type.full_name]
        inner = getattr(message, field.name)
        inner.CopyFrom(_copy(rng.choice(found))) if found else inner.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), rng))


def _copy(message: Message) -> Message:
    """Where it is put, it may lie in itself otherwise."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _take(message: Message, other: Message, field: FieldDescriptor, rng: random.Random) -> None:
    """The same field as ``other`` has, or all of it."""
    if rng.random() < 0.2:
        message.CopyFrom(other)
        return
    message.ClearField(field.name)
    if _repeats(field):
        getattr(message, field.name).extend(getattr(other, field.name))
    elif other.HasField(field.name) and field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(getattr(other, field.name))
    elif other.HasField(field.name):
        setattr(message, field.name, getattr(other, field.name))


def _mutate_list(values: Any, field: FieldDescriptor, others: Sequence[Message], rng: random.Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 and values:
        del values[rng.randrange(len(values))]
    elif kind == 1 and len(values) > 1:
        rest = [*values]
        rng.shuffle(rest)
        del values[:]
        values.extend(rest)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        found = [m for m in others if m.DESCRIPTOR.full_name == field.message_type.full_name]
        values.extend([_copy(rng.choice(found))]) if found else values.add()
    elif kind == 2 and values:
        i = rng.randrange(len(values))
        values[i] = _scalar(field, values[i], rng)
    else:
        like = (
            rng.choice(values)
            if values
            else field.default_value or (0 if field.type != FieldDescriptor.TYPE_STRING else "")
        )
        if field.type == FieldDescriptor.TYPE_BYTES:
            like = like if isinstance(like, bytes) else b""
        values.extend([_scalar(field, like, rng)] * rng.choice((1, 1, 1, 2, 70)))


def _scalar(field: FieldDescriptor, old: Any, rng: random.Random) -> Any:
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice((*WORDS, old + "x", old[:-1]))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(old, rng) if old else rng.choice(WORDS).encode()
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    whole = rng.choice((*INTEGERS, old + 1, old - 1, -old))
    low, high = (0, 2**64) if field.type == FieldDescriptor.TYPE_UINT64 else (-_WHOLE[field.type], _WHOLE[field.type])
    return max(low, min(high - 1, whole))


# --- bytes, JSON, arrays ------------------------------------------------------------------------------


def mutated_bytes(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        i = rng.randrange(len(data) or 1)
        match rng.randrange(5):
            case 0 if data:
                data[i] = rng.randrange(256)
            case 1:
                del data[i : i + rng.randrange(1, 20)]
            case 2:
                data[i:i] = rng.randbytes(rng.randrange(1, 8))
            case 3:
                del data[max(i, 1) :]
            case _:
                data[i : i + 8] = rng.choice(INTEGERS).to_bytes(8, "little", signed=True)
    return bytes(data)


def mutated_json(text: str, rng: random.Random) -> str:
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        parents = [d for d in _documents(document) if d]
        if not parents:
            break
        parent = rng.choice(parents)
        key = rng.choice([*parent]) if isinstance(parent, dict) else rng.randrange(len(parent))
        match rng.randrange(5):
            case 0:
                del parent[key]
            case 1:
                parent[key] = rng.choice([d for d in _documents(document) if not _holds(d, parent)] or [None])
            case 2 if isinstance(parent, dict):
                parent[rng.choice(WORDS)] = parent.pop(key)
            case _:
                parent[key] = rng.choice(
                    (None, True, {}, [], "", *WORDS, *INTEGERS, *FLOATS, 10**400, [[[]]], {"a": 1})
                )
    return json.dumps(document)


def _holds(outer: Any, inner: Any) -> bool:
    return any(d is inner for d in _documents(outer))


def _documents(document: Any) -> list[Any]:
    found, stack = [], [document]
    while stack:
        top = stack.pop()
        if isinstance(top, dict | list):
            found.append(top)
            stack.extend(top.values() if isinstance(top, dict) else top)
    return found


def mutated_safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header as JSON, its own documents in it, or the bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length].decode(), content[8 + length :]
    document = json.loads(header)
    inner = document.get("__metadata__", {})
    if inner and rng.random() < 0.6:
        key = rng.choice([*inner])
        inner[key] = mutated_json(inner[key], rng) if inner[key].startswith("{") else rng.choice(WORDS)
        header = json.dumps(document)
    else:
        header = mutated_json(header, rng)
    encoded = header.encode("utf-8", "surrogatepass")
    claimed = rng.choice((len(encoded), len(encoded), len(encoded), 0, 2**40, 2**63))
    return struct.pack("<Q", claimed) + encoded + data


def mutated_npy(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    (length,) = struct.unpack("<H", content[8:10])
    header = content[10 : 10 + length].decode("latin1").strip()
    shapes = (
        "()",
        "(0,)",
        "(-1,)",
        f"({2**40},)",
        f"({2**62}, {2**62})",
        "(1.5,)",
        "('a',)",
        "5",
        "(" * 300,
        "(3, 4",
        "[3]",
    )
    kinds = (
        "'|O'",
        "'<f4'",
        "'>i8'",
        "'<U1000000000'",
        "'|V0'",
        "'nonsense'",
        "[('a', '<f4')]",
        "None",
        "'<M8[s]'",
        "__import__",
    )
    start, end = header.find("'shape'"), header.rfind("}")
    match rng.randrange(5):
        case 0:
            header = f"{header[:start]}'shape': {rng.choice(shapes)}, }}"
        case 1:
            header = header.replace(header.split("'descr': ")[1].split(", 'fortran")[0], rng.choice(kinds))
        case 2:
            header = header[:end]
        case 3:
            header = header.replace(
                rng.choice(("'descr'", "'shape'", "False", ",")), rng.choice(("", "'a'", "True", "{"))
            )
        case _:
            header = mutated_bytes(header.encode("latin1"), rng).decode("latin1")
    encoded = header.encode("latin1") + b"\n"
    return content[:8] + struct.pack("<H", min(len(encoded), 65535)) + encoded + content[10 + length :]


def mutated_npz(content: bytes, rng: random.Random) -> bytes:
    """Members of other names, with other headers, twice, missing; or the archive's bytes."""
    if rng.random() < 0.3:
        return mutated_bytes(content, rng)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    i = rng.randrange(len(members))
    name, data = members[i]
    match rng.randrange(4):
        case 0:
            members[i] = (rng.choice((*WORDS, "x", "x.npy.npy", "../x.npy")), data)
        case 1:
            del members[i]
        case 2:
            members.append(members[i])
        case _:
            members[i] = (name, mutated_npy(data, rng))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, data in members:
            archive.writestr(name or "_", data)
    return out.getvalue()


def array_bytes(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()
