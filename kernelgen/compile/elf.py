"""Reads ELF files that compilers wrote: whether one is complete, and its sections."""

from __future__ import annotations

import struct

_NO_BITS = 8


def is_whole(elf: bytes) -> bool:
    """Whether an ELF file has both of its tables and all that they name. Loading a torn file may crash the process."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return elf[:4] == b"\x7fELF"  # 32 bits or big-endian: not checked further
    if len(elf) < 0x40:
        return False
    segments_at, sections_at = struct.unpack_from("<QQ", elf, 0x20)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", elf, 0x36)
    ends = [sections_at + section_size * sections, segments_at + segment_size * segments]
    if not sections_at or section_size < 0x40 or (segments and segment_size < 0x38) or max(ends) > len(elf):
        return False
    for at in range(sections_at, ends[0], section_size):
        kind, _, _, begin, size = struct.unpack_from("<IQQQQ", elf, at + 4)
        ends.append(0 if kind == _NO_BITS else begin + size)
    for at in range(segments_at, ends[1], segment_size or 1):
        begin, _, _, size = struct.unpack_from("<QQQQ", elf, at + 8)
        ends.append(begin + size)
    return max(ends) <= len(elf)


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
