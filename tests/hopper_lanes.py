# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel's own code on the CPU, a lane at a time: what stands for its instructions, memory and compiler."""

from __future__ import annotations

import ast
import functools
import inspect
import struct
import textwrap
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparsemla.kernels.hopper import build, gather, ptx, query
from sparsemla.kernels.hopper.kernel import SparseKernel

BANKS = 32
PLAIN = SimpleNamespace(
    max=max, min=min, range_constexpr=range, const_expr=bool, range=lambda *bounds, unroll: range(*bounds)
)
"""What the kernel takes from `cutlass`, in Python."""


def in_python(method: Any, module: ModuleType) -> Callable[..., Any]:
    """A method of the kernel as it was written. To be called before anything is compiled: that replaces its code."""
    return FunctionType(inspect.unwrap(method).__code__, vars(module))


LOAD_QUERY = in_python(SparseKernel.load_query, query)
STORE_QUERY = in_python(SparseKernel.store_query, query)
STORE_COLUMNS = in_python(SparseKernel.store_columns, query)
COPY = in_python(SparseKernel.copy, gather)
BRING = in_python(SparseKernel.bring, gather)
ADDRESS_OF = in_python(SparseKernel.address_of, gather)


def made(kind: str, heads: int, rope: bool, cluster: int = 1) -> SparseKernel:
    kernel: SparseKernel = build.make_kernel(build.Variant(kind, heads, rope, cluster))
    return kernel


class Statements:
    """Some statements of a long method, to be run alone. Each is named by how it starts; there must be one such."""

    def __init__(self, method: Any, module: ModuleType, *starts: str) -> None:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(method)))
        known = [(ast.unparse(node), node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        found = []
        for start in starts:
            (one,) = [node for text, node in known if text.startswith(start)]
            found.append(one)
        self.code = compile(ast.Module(found, []), inspect.getfile(method), "exec")
        self.names = {**vars(module), "cutlass": PLAIN, "Int32": int, "Uint32": int, "base": 0}

    def run(self, kernel: SparseKernel, /, **names: Any) -> SimpleNamespace:
        """The names as the statements leave them."""
        scope = self.names | {"self": kernel} | names
        exec(self.code, scope)
        return SimpleNamespace(**scope)


def f32(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("I", bits % 2**32))[0]
    return value


def bf16x2(low: float, high: float) -> int:
    """Two floats to one word, as PTX's cvt.rn.bf16x2.f32."""
    low_bits, high_bits = torch.tensor([low, high]).to(torch.bfloat16).view(torch.int16).tolist()
    return (high_bits & 0xFFFF) << 16 | low_bits & 0xFFFF


def f16x2(low: float, high: float) -> int:
    """Two floats to one word, as PTX's cvt.rn.f16x2.f32."""
    word = 0
    for place, value in enumerate((low, high)):
        try:
            (bits,) = struct.unpack("<H", struct.pack("<e", value))
        except OverflowError:
            bits = 0xFC00 if value < 0 else 0x7C00
        word |= bits << 16 * place
    return word


def f16s(word: int) -> tuple[float, float]:
    low, high = struct.unpack("<2e", struct.pack("<I", word))
    return low, high


def bf16s(word: int) -> tuple[float, float]:
    return f32(word << 16), f32(word & 0xFFFF0000)


def max_u16x2(a: int, b: int) -> int:
    return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF)


E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()


def _e4m3x4_to_f16x4(word: int) -> tuple[int, int]:
    a, b, c, d = (E4M3[byte] for byte in struct.pack("<I", word))
    return f16x2(a, b), f16x2(c, d)


def _bytes_of(a: int, b: int, selector: int) -> int:
    eight = struct.pack("<II", a, b)
    word: int = struct.unpack("<I", bytes(eight[selector >> 4 * i & 7] for i in range(4)))[0]
    return word


def _product(a: tuple[float, float], b: tuple[float, float], pack: Callable[[float, float], int]) -> int:
    return pack(a[0] * b[0], a[1] * b[1])


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "bits_to_f32": f32,
    "byte": lambda word, index: word >> 8 * index & 0xFF,
    "bytes_of": _bytes_of,
    "e4m3x4_to_f16x4": _e4m3x4_to_f16x4,
    "interleave": lambda a, b, half: _bytes_of(a, b, 0x7362 if half else 0x5140),
    "interleave_halves": lambda a, b, half: _bytes_of(a, b, 0x7632 if half else 0x5410),
    "max_u16x2": max_u16x2,
    "mul_bf16x2": lambda a, b: _product(bf16s(a), bf16s(b), bf16x2),
    "mul_f16x2": lambda a, b: _product(f16s(a), f16s(b), f16x2),
    "mul_f16x2_by": lambda a, b, half: _product(f16s(a), (f16s(b)[half],) * 2, f16x2),
    "pack_f16x2": f16x2,
    "select": lambda condition, a, b: a if condition else b,
}
"""What instructions do to words, by their names in `ptx`."""


class Shared:
    """Shared memory: bytes that are NaN in every type until they are written."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(b"\xff" * size)

    def words(self, address: int, count: int) -> tuple[int, ...]:
        assert address % (4 * count) == 0
        return struct.unpack_from(f"<{count}I", self.bytes, address)

    def store_halves(self, address: int, word: int, distance: int) -> None:
        for i in range(2):
            struct.pack_into("<H", self.bytes, address + i * distance, word >> 16 * i & 0xFFFF)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes the kernel's instructions work on this memory."""
        for name, fake in ARITHMETIC.items():
            monkeypatch.setattr(ptx, name, fake)
        monkeypatch.setattr(ptx, "Uint32", int)
        monkeypatch.setattr(ptx, "lds_u32", lambda address: self.words(address, 1)[0])
        monkeypatch.setattr(ptx, "lds_v2u32", lambda address: self.words(address, 2))
        monkeypatch.setattr(ptx, "lds128", lambda address: self.words(address, 4))
        monkeypatch.setattr(ptx, "sts_halves", self.store_halves)


class Exchange:
    """A butterfly shuffle among lanes that run one after the other: again and again, until what they sent stays."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Any] = {}
        self.sent: dict[tuple[int, int], Any] = {}
        self.lane = self.number = 0

    def shuffle(self, value: Any, distance: int) -> Any:
        self.sent[self.lane, self.number] = value
        self.number += 1
        return self.known.get((self.lane ^ distance, self.number - 1), 0)

    def run(self, lanes: range, body: Callable[[int], Any]) -> list[Any]:
        while True:
            self.sent = {}
            results = []
            for lane in lanes:
                self.lane, self.number = lane, 0
                results.append(body(lane))
            if self.sent == self.known:
                return results
            self.known = self.sent


def store_row(
    kernel: SparseKernel, row: int, nope: list[int], rotary: list[int], monkeypatch: pytest.MonkeyPatch
) -> dict[int, Any]:
    """What the half-warp of one query row leaves in shared memory, by address: pairs of columns, and the factor.

    Args:
        kernel: of 16 heads.
        row: row of the query tile.
        nope: bits of the bf16 columns that q_nope has.
        rotary: those of q_rope.
        monkeypatch: pytest's.
    """
    stored: dict[int, Any] = {}
    columns = {2**20 + 2 * i: bits for i, bits in enumerate(nope)}
    columns |= {2**21 + 2 * i: bits for i, bits in enumerate(rotary)}

    def store(address: int, value: Any) -> None:
        assert address not in stored
        stored[address] = value

    def load(address: int, predicate: int) -> list[int]:
        if not predicate:
            return [0] * 4
        return [columns[address + 4 * w] | columns[address + 4 * w + 2] << 16 for w in range(4)]

    largest = max(value & 0x7FFF for value in (*nope, *rotary))
    monkeypatch.setattr(query, "cutlass", PLAIN)
    monkeypatch.setattr(query, "cute", SimpleNamespace(make_rmem_tensor=lambda shape, dtype: {}))
    monkeypatch.setattr(query, "arch", SimpleNamespace(shuffle_sync_bfly=lambda value, distance: largest))
    for name, kind in (("Int32", int), ("Int64", int), ("Uint32", int), ("Float32", float)):
        monkeypatch.setattr(query, name, kind)
    fakes: dict[str, Any] = {
        "max_u16x2": max_u16x2,
        "bits_to_f32": f32,
        "pack_f16x2": lambda low, high: ("f16", low, high),
        "pack_bf16x2": lambda low, high: ("bf16", low, high),
        "fmin": min,
        "fmax": max,
        "ldg128": load,
        "sts_i32": store,
        "sts_f32": store,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(ptx, name, fake)
    monkeypatch.setattr(ptx, "Uint32", int)
    monkeypatch.setattr(kernel, "store_query", functools.partial(STORE_QUERY, kernel))
    monkeypatch.setattr(kernel, "store_columns", functools.partial(STORE_COLUMNS, kernel))
    # Rows of one token, of which only `row` is in memory.
    strides = {"q_nope_token": 0, "q_nope_head": 2048, "q_rope_token": 0, "q_rope_head": 256}
    starts = {"q_nope": 2**20 - 2048 * row, "q_rope": 2**21 - 256 * row}
    p = SimpleNamespace(scale_log2=1.0, heads=16, **starts, **strides)
    for lane in range(16):
        LOAD_QUERY(kernel, p, 0, 0, 0, row // 2, row % 2 * 16 + lane, 8)
    return stored


def query_columns(
    kernel: SparseKernel, row: int, monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[str, tuple[int, int]]]:
    """Of every even place along K of the query operand: the type there, and which columns of the query it holds.

    Places from 512 on are the rotary operand's. Columns count q_nope's, then q_rope's.
    """
    latent = 448 if kernel.kind == "v4" else 512
    bits = [0x3F80 + column for column in range(latent + 64 * kernel.rope)]  # from 1.0 on, all different
    stored = store_row(kernel, row, bits[:latent], bits[latent:], monkeypatch)
    factor = stored.pop(kernel.off_q_factor + row * 4)
    names = {f32(value << 16): column for column, value in enumerate(bits)}
    found = {}
    for place in range(0, 576 if kernel.rope else 512, 2):
        # Rows of 128 bytes of an operand, swizzled: pieces of 16 bytes are exchanged by the row's lowest bits.
        start = kernel.off_q + place // 64 * kernel.heads * 128 if place < 512 else kernel.off_q_rope
        address = start + row * 128 + (place % 64 // 8 ^ row % 8) * 16 + place % 8 * 2
        kind, *pair = stored.pop(address)
        if latent <= place < 512:
            assert pair == [0, 0]  # V4 has no such columns
            continue
        first, second = (names[value * factor] for value in pair)
        found[place] = kind, (first, second)
    assert not stored
    return found
