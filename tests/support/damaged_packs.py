"""A small pack of every kind of call without compiled code, and what a disk, a stranger or a mistake may make of it."""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import packed_calls

from kernelgen.compile.pack_file import PTX, PackFile, write_pack
from kernelgen.device import assumed, cuda_facts
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.ops.product import build
from kernelgen.packs.write import Call, Content
from kernelgen.version import GENERATOR_VERSION

# An ELF file with one section that has no bytes.
ELF = struct.pack("<6s34xQ10xHH2x", b"\x7fELF\x02\x01", 0x40, 0x40, 1) + bytes(0x40)
# Fields that no reader reads, which may be anything.
FREE = {"problem", "direction", "schedule", "dtype", "equitune"}
# By the kind of JSON's value, what a field of another kind is given.
OTHERS: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "number": -7,
    "fraction": 1.5,
    "huge": 10**30,
    "infinite": float("inf"),
    "nan": float("nan"),
    "text": "x",
    "list": [],
    "nested": [[1]],
    "table": {},
}
Case = tuple[str, bytes]


def index_of_all() -> dict[str, Any]:
    """The index of a pack with products, a family, harmonics, contractions and kernels for a GPU."""
    content = Content(("int64",), (cuda_facts("sm_80"),))
    family = packed_calls.of_operator(
        packed_calls.family(), packed_calls.reference.make_case(packed_calls.problem(), "conv")
    )
    for given in (*family[:2], *packed_calls.harmonics()[:2], *packed_calls.contractions()[:1]):
        content.add(packed_calls.call_of(given))
    with assumed(cuda_facts("sm_80")):
        waves = CudaSchedule(accumulate="atomics", runs="waves", zeros="inside")
        content.add(Call("tp_backward", build(packed_calls.problem(), waves, device="cuda").text, "", "yw"))
    for kernel in content.kernels:
        kernel["resources"] = {"code_bytes": 1}
    return {
        "equitune": "0",
        "generator": GENERATOR_VERSION,
        "machine": "",
        "features": ["none"],
        "kernels": content.kernels,
        "operators": content.operators,
    }


def write(path: Path, index: dict[str, Any]) -> Path:
    """The pack of an index, whose kernels are an empty ELF file, or PTX."""
    codes = [b".target sm_80" if kernel["target"] == PTX else ELF for kernel in index["kernels"]]
    write_pack(path, json.loads(json.dumps(index)), codes)
    return path


def with_index(data: bytes, text: str) -> bytes:
    """The same pack with another index, whose checksum is right."""
    size = int.from_bytes(data[16:24], "little")
    code, new = data[24 + size + -(24 + size) % 64 :], text.encode()
    head = data[:12] + zlib.crc32(new).to_bytes(4, "little") + len(new).to_bytes(8, "little")
    return head + new + bytes(-(24 + len(new)) % 64) + code


def flipped(data: bytes, count: int, seed: int) -> Iterator[Case]:
    """One bit is another, anywhere; and in each byte of the head."""
    draw = random.Random(seed)
    for at in (*range(24), *(draw.randrange(24, len(data)) for _ in range(count))):
        bit = draw.randrange(8)
        yield f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def torn(data: bytes, count: int, seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for size in (0, 7, 23, *(draw.randrange(24, len(data) - 64) for _ in range(count))):
        yield f"the first {size} bytes", data[:size]


def swapped(data: bytes, index: dict[str, Any], seed: int) -> Iterator[tuple[str, bytes, bool]]:
    """Each field of the index given a value of another kind, or left out; and whether a reader must refuse it."""
    draw = random.Random(seed)
    for path in _paths(index):
        new = copy.deepcopy(index)
        inner = new
        for name in path[:-1]:
            inner = inner[name]
        free = (path[-1] in FREE and path[0] != "operators") or "resources" in path[:-1]
        # Words that are no JSON are refused by the library in any field.
        kind = draw.choice(["missing", *(name for name in OTHERS if not (free and name in ("infinite", "nan")))])
        old = inner[path[-1]]
        if kind == "missing":
            del inner[path[-1]]
        else:
            inner[path[-1]] = OTHERS[kind]
        free |= path[-1] == "weights" and kind == "null"
        # A field less of a list, or of a table with any names, and a kind that is the old one's, may be valid.
        alike = type(old) is type(OTHERS.get(kind)) or kind == "missing"
        yield f"{path} {kind}", with_index(data, json.dumps(new)), not (free or alike)


def _paths(value: Any, before: tuple = ()) -> Iterator[tuple]:
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*before, name)
        if isinstance(inner, dict | list):
            yield from _paths(inner, (*before, name))


def meaning(path: Path) -> tuple[Any, list[bytes]]:
    """All of a pack; PackError if it is damaged."""
    file = PackFile(path)
    return file.index, [file.code(kernel) for kernel in file.index["kernels"]]
