"""Reads ELF files that compilers wrote: whether one is complete, and its sections."""

from __future__ import annotations

import struct


def is_whole(elf: bytes) -> bool:
    """Whether an ELF file has its section table, which comes last. Loading a truncated file may crash the process."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return elf[:4] == b"\x7fELF"  # 32 bits or big-endian: not checked further
    if len(elf) < 0x40:
        return False
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count = struct.unpack_from("<HH", elf, 0x3A)
    return table > 0 and table + entry_size * count <= len(elf)


def section(elf: bytes, name: str) -> bytes:
    """A section of a complete 64-bit little-endian ELF file; empty if there is none of that name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name_at, _, _, _, at, size in headers:
        start = names_at + name_at
        if elf[start : elf.index(b"\0", start)] == name.encode():
            return elf[at : at + size]
    return b""
