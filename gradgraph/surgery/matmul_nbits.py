"""Integers as packed by onnxruntime's MatMulNBits: rows of blocks of bytes, low bits first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from gradgraph.graph.quantisers import Array


@dataclass(frozen=True)
class Packing:
    """The sizes of a MatMulNBits (com.microsoft): K inputs, N outputs, the bit width, and the block size along K."""

    K: int
    N: int
    bits: int
    block_size: int

    @classmethod
    def of(cls, node: ir.Node) -> Packing:
        return cls(*(node.attributes[k].as_int() for k in ("K", "N", "bits", "block_size")))

    @property
    def blocks(self) -> int:
        """The number of blocks in a row."""
        return -(-self.K // self.block_size)

    def weight(self, packed: Array) -> Array:
        """Return the unpacked integers of a weight: (N, blocks · block size)."""
        numbers = unpacked_bits(packed.reshape(self.N, self.blocks, -1), self.bits)
        return numbers[..., : self.block_size].reshape(self.N, -1)

    def points(self, points: Array | None) -> Array:
        """Return the zero points (N, blocks), unpacked if they are packed; 2^(bits-1) if the node has none."""
        if points is None:
            return np.full((self.N, self.blocks), 2.0 ** (self.bits - 1), np.float32)
        if points.dtype == np.uint8:
            return unpacked_bits(points.reshape(self.N, -1), self.bits)[:, : self.blocks]
        return points.reshape(self.N, self.blocks)

    def packed_weight(self, numbers: Array, like: Array) -> Array:
        """Pack the integers of a weight (N, blocks · block size), in the shape of ``like``."""
        return packed_bits(numbers.reshape(self.N, self.blocks, -1), self.bits, like.shape[-1]).reshape(like.shape)

    def packed_points(self, points: Array, like: Array) -> Array:
        """Return zero points (N, blocks) in the storage format of ``like``: packed if it is uint8, otherwise plain."""
        if like.dtype == np.uint8:
            return packed_bits(points, self.bits, like.size // self.N).reshape(like.shape)
        return points.reshape(like.shape).astype(like.dtype)


def unpacked_bits(packed: Array, bits: int) -> Array:
    """Return the integers of ``bits`` bits along the last axis of bytes."""
    if bits == 8:
        return packed
    each = 8 // bits
    parts = [(packed >> (bits * i)) & (2**bits - 1) for i in range(each)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], packed.shape[-1] * each)


def packed_bits(numbers: Array, bits: int, size: int) -> Array:
    """Pack the last axis of ``numbers`` into ``size`` bytes, padded with zeros."""
    each = 8 // bits
    full = np.zeros((*numbers.shape[:-1], size * each), np.uint8)
    full[..., : numbers.shape[-1]] = numbers
    parts = full.reshape(*numbers.shape[:-1], size, each) << (bits * np.arange(each, dtype=np.uint8))
    return np.asarray(np.bitwise_or.reduce(parts, -1), np.uint8)
