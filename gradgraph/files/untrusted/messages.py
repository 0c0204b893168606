"""ONNX messages that anybody may have written: parsed here, and checked by ``gradgraph.files.protos``."""

from __future__ import annotations

import onnx

from gradgraph.files.untrusted.regular import UnreadableError


def message_of(content: bytes) -> onnx.ModelProto:
    """The model in the bytes of a file, before anybody has looked at what it says.

    Raises:
        UnreadableError: they do not parse.
    """
    try:
        return onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf raises DecodeError, a class of no public module
        raise UnreadableError("its protobuf does not parse, nor would graphs nested more than 32 deep") from error
