"""Sizes are read from protobuf messages in one place, so that 0, a name and nothing mean the same everywhere."""

import re
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gradgraph.graph.shapes import Shape, shape_of_type, size_of_name

ROOT = Path(__file__).parents[2]
READS_SIZES = re.compile(r"\bdim_(value|param)\b(?!\s*=[^=])")  # what assigns them reads nothing
READERS = {
    "gradgraph/graph/shapes.py",
    "gradgraph/reduction/anonymous.py",  # it names sizes anew
    "gradgraph/reduction/strategies.py",  # it makes them smaller
}


def tensor(*dims: int | str | None) -> onnx.TypeProto:
    return helper.make_tensor_type_proto(TensorProto.FLOAT, dims)


def without_a_rank() -> onnx.TypeProto:
    return helper.make_tensor_type_proto(TensorProto.FLOAT, None)


def with_an_empty_name() -> onnx.TypeProto:
    made = tensor(None)
    made.tensor_type.shape.dim[0].dim_param = ""
    return made


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (tensor(2, 3), (2, 3)),
        (tensor(0, "batch", None), (0, "batch", None)),
        (tensor(), ()),
        (with_an_empty_name(), (None,)),
        (without_a_rank(), None),
        (helper.make_sequence_type_proto(tensor("n", 4)), ("n", 4)),
        (helper.make_optional_type_proto(helper.make_sequence_type_proto(tensor(0))), (0,)),
        (helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [5]), (5,)),
        (onnx.TypeProto(), None),
        (None, None),
    ],
)
def test_sizes_of_a_protobuf_type(kind: onnx.TypeProto | None, shape: Shape | None) -> None:
    assert shape_of_type(kind) == shape


def test_nothing_else_reads_sizes_of_protobuf_types() -> None:
    rooms = ("gradgraph", "frontend", "export", "cli")
    files = [p for room in rooms for p in (ROOT / room).rglob("*.py") if not p.parent.is_symlink()]
    assert len(files) > 400
    found = {p.relative_to(ROOT).as_posix() for p in files if READS_SIZES.search(p.read_text(encoding="utf-8"))}
    assert found == READERS


@pytest.mark.parametrize(
    ("name", "size"), [("batch", 8), ("11*batch", 88), ("2 * batch * other", 48), ("other", 3), ("a*b", 5)]
)
def test_sizes_of_names(name: str, size: int) -> None:
    assert size_of_name(name, {"batch": 8, "a*b": 5}, otherwise=3) == size
