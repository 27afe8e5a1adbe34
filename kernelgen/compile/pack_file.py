"""Packs: files of compiled kernels, which run without a compiler and without a folder that can be written.

A pack is (all numbers little-endian):

    8 bytes    "EQTNPACK"
    4 bytes    number of the format, 2
    4 bytes    crc32 of the index
    8 bytes    bytes of the index
    the index  JSON in UTF-8, padded with zeros to a multiple of 64 bytes from the beginning of the file
    the code   of one kernel after the other, each padded to 64 bytes

The index has ``kernels``: for each its place (``offset`` from the beginning of the code, and ``size``), ``sha256`` and
``crc32`` of its code, its ``entry``, its ``target`` (``cpu`` or an architecture such as ``sm_90``), the sha256 of its
``source``, what the compiler reported (``resources``), and of a tuned kernel its ``certificate``. ``machine`` and
``features`` say which processors run the kernels for the CPU. ``operators`` are described in ``kernelgen.packs.calls``;
only programs without Python read them. ``pack_index`` checks all of this. Python also reads a pack that is compressed
by xz, as those in folders are (``shipped``).

Packs of format 1 are refused: nothing tells whether their index is as it was written, and most hold kernels of an
older generator, which would not be found.

Packs in ``$EQUITUNE_PACK`` (separated by colons) and those given to :func:`load_pack` come before the cache and the
compiler. Kernels of a pack run with your rights: load only packs that you trust.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import re
import stat
import struct
import threading
import warnings
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernelgen.compile.cache import Binary
from kernelgen.compile.elf import is_whole
from kernelgen.compile.host import processor_features
from kernelgen.compile.pack_index import check_index
from kernelgen.device import DeviceFacts
from kernelgen.emit.source import Source
from kernelgen.errors import PackError, cause_of
from kernelgen.json_data import parse_json
from kernelgen.version import GENERATOR_VERSION

FORMAT = 2
# The target of a kernel as PTX, for architectures newer than those of the pack.
PTX = "ptx"
_MAGIC, _HEAD, _ALIGNMENT = b"EQTNPACK", 24, 64
_XZ = b"\xfd7zXZ\0"
_lock = threading.Lock()
_packs: dict[str, PackFile] = {}
_from_environment: set[str] = set()
_called_old: set[str] = set()


def target_of(facts: DeviceFacts) -> str:
    """The name in a pack of the device that a kernel is compiled for."""
    return facts.arch if facts.backend == "cuda" else "cpu"


def targets_for(facts: DeviceFacts) -> list[str]:
    """The targets whose code runs on a device, the best one first; PTX of an older architecture is the last."""
    if facts.backend != "cuda" or facts.is_hip:
        return [target_of(facts)]
    number = _number(facts.arch)
    return [*(f"sm_{minor}" for minor in range(number, number // 10 * 10 - 1, -1)), PTX]


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _runs_ptx(facts: DeviceFacts, code: bytes) -> bool:
    """Whether PTX is for this architecture or an older one."""
    found = re.search(rb"\.target sm_(\d{1,9})", code)
    return found is not None and int(found[1]) <= _number(facts.arch)


def source_digest(source: Source) -> str:
    """The name in a pack of a kernel's source."""
    return hashlib.sha256(source.text.encode()).hexdigest()


def write_pack(path: Path, index: Mapping[str, Any], codes: Iterable[bytes]) -> None:
    """Write a pack; ``index["kernels"]`` gets place and digests of each of ``codes``, which have the same order."""
    code, kernels = bytearray(), []
    for facts, one in zip(index["kernels"], codes, strict=True):
        place = {"offset": len(code), "size": len(one), "crc32": zlib.crc32(one)}
        kernels.append(dict(facts) | place | {"sha256": hashlib.sha256(one).hexdigest()})
        code += one + bytes(-len(one) % _ALIGNMENT)
    text = json.dumps(dict(index) | {"kernels": kernels}, sort_keys=True).encode()
    head = struct.pack("<8sIIQ", _MAGIC, FORMAT, zlib.crc32(text), len(text))
    data = head + text + bytes(-(_HEAD + len(text)) % _ALIGNMENT) + bytes(code)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        raise PackError(f"{path} cannot be written ({cause_of(error)}); name another file") from error


def read_plain(path: Path) -> bytes:
    """The bytes of a file; OSError, or ValueError for a pipe or a device, which may never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no plain file")
        return file.read()


class PackFile:
    """An open pack. ``index``: see the file's docstring."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        data = self._read()
        if len(data) < _HEAD or data[:8] != _MAGIC:
            raise PackError(f"{self.path} is no pack; expected a file that 'equitune pack' wrote")
        _, found, crc, size = struct.unpack_from("<8sIIQ", data)
        if found != FORMAT:
            raise PackError(f"{self.path} has format {found}; this version reads {FORMAT}: write it again")
        text, self._code = data[_HEAD : _HEAD + size], data[_HEAD + size + -(_HEAD + size) % _ALIGNMENT :]
        if len(text) != size or zlib.crc32(text) != crc:
            raise self._damaged("its index is not what was written")
        try:
            self.index: dict[str, Any] = parse_json(text)
            check_index(self.index, len(self._code))
        except ValueError as error:
            raise self._damaged(str(error)) from error
        self._places = {(k["source"], k["entry"], k["target"]): k for k in self.index["kernels"]}
        self._binaries: dict[tuple[str, str, str], Binary] = {}

    def _read(self) -> bytes:
        try:
            data = read_plain(self.path)
            return lzma.decompress(data) if data.startswith(_XZ) else data
        except (OSError, ValueError, MemoryError, lzma.LZMAError) as error:
            reason = cause_of(error) or "too large for this machine's memory"
            raise PackError(f"{self.path} cannot be read ({reason}); expected a pack of 'equitune pack'") from error

    def _damaged(self, reason: str) -> PackError:
        return PackError(f"{self.path} is damaged ({reason}): write it again")

    def check_processor(self) -> None:
        """PackError if the kernels for the CPU need another processor."""
        if reason := self.misfit():
            raise PackError(f"{self.path} {reason}")

    def misfit(self) -> str:
        """Why this processor cannot run the kernels for the CPU; empty if it can, or if there are none."""
        machine, needed = self.index["machine"], set(self.index["features"])
        if machine and machine != platform.machine():
            return f"is for {machine}, this machine is {platform.machine()}: write one for it"
        if machine and (missing := sorted(needed - processor_features())):
            return f"needs a processor with {', '.join(missing)}: write one with --cpu x86-64-v3"
        return ""

    def code(self, facts: Mapping[str, Any]) -> bytes:
        """The code of a kernel, an entry of ``index["kernels"]``; PackError if it is damaged or was never whole."""
        code = self._code[facts["offset"] : facts["offset"] + facts["size"]]
        if hashlib.sha256(code).hexdigest() != facts["sha256"] or not (facts["target"] == PTX or is_whole(code)):
            raise self._damaged(f"the code of kernel {facts['source'][:16]} for {facts['target']} is not whole")
        return code

    def find(self, source: Source, facts: DeviceFacts) -> Binary | None:
        """The kernel of a source, as a file in memory; None if the pack lacks it.

        Of a GPU that the pack has no code for: an older architecture's of the same major number, or PTX.
        """
        name = (source_digest(source), source.entry)
        for target in targets_for(facts):
            place = self._places.get((*name, target))
            if place is not None and (target != PTX or _runs_ptx(facts, self.code(place))):
                return self._binary((*name, target), place)
        return None

    def _binary(self, key: tuple[str, str, str], place: Mapping[str, Any]) -> Binary:
        with _lock:
            if key not in self._binaries:
                # Stays open, because the loader knows a library by its path.
                file = os.memfd_create("equitune-kernel")
                with os.fdopen(os.dup(file), "wb") as out:
                    out.write(self.code(place))
                self._binaries[key] = Binary(Path(f"/proc/self/fd/{file}"), dict(place["resources"]))
            return self._binaries[key]


def load_pack(path: str | os.PathLike) -> PackFile:
    """Use the kernels of a pack in this process, before the cache and the compiler.

    Raises PackError if the file is no pack, is damaged, or is for other processors.
    """
    pack = PackFile(path)
    pack.check_processor()
    _packs[str(pack.path.resolve())] = pack
    return pack


def find_in_packs(source: Source, facts: DeviceFacts) -> Binary | None:
    """The kernel of a source from the first loaded pack that has it.

    None if there is none; then packs of another generator are named in a warning, once, since their texts may differ.
    """
    for path in filter(None, os.environ.get("EQUITUNE_PACK", "").split(os.pathsep)):
        if path not in _from_environment:
            load_pack(path)
            _from_environment.add(path)
    for pack in tuple(_packs.values()):
        binary = pack.find(source, facts)
        if binary is not None:
            return binary
    for path in _packs.keys() - _called_old:
        _called_old.add(path)
        if (generator := _packs[path].index["generator"]) != GENERATOR_VERSION:
            warnings.warn(
                f"{path} lacks a kernel: generator {generator} wrote it, and this is {GENERATOR_VERSION}; write it "
                "again",
                stacklevel=2,
            )
    return None
