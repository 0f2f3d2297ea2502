"""Token ids, mask bits and numbers as the packed bytes of the protos (see worker.proto). Standard library only."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TypeVar

N = TypeVar("N", int, float)


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32."""
    return _little_endian(array("i", ids)).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Inverse of `pack_ids`; raises ValueError if the length is not a multiple of 4."""
    return _little_endian(array("i", data)).tolist()


def pack_floats(values: Sequence[float]) -> bytes:
    """Pack numbers as little-endian float32."""
    return _little_endian(array("f", values)).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Inverse of `pack_floats`; raises ValueError if the length is not a multiple of 4."""
    return _little_endian(array("f", data)).tolist()


def _little_endian(values: array[N]) -> array[N]:
    """From the machine's order to the wire's, or back; in place."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed_bits_size(num_bits: int) -> int:
    """Bytes of `num_bits` packed bits."""
    return (num_bits + 7) // 8


def pack_bits(bits: Sequence[bool]) -> bytes:
    """Pack flags, least significant bit first."""
    value = 0
    for index, bit in enumerate(bits):
        value |= bool(bit) << index
    return value.to_bytes(packed_bits_size(len(bits)), "little")


def unpack_bits(data: bytes, num_bits: int) -> list[bool]:
    """Inverse of `pack_bits`; raises ValueError on a wrong length or on bits set beyond `num_bits`."""
    value = int.from_bytes(data, "little")
    if len(data) != packed_bits_size(num_bits) or value >> num_bits:
        raise ValueError(f"{len(data)} bytes do not hold {num_bits} bits")
    return [bool(value >> index & 1) for index in range(num_bits)]
