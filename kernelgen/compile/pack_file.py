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
``features`` say which processors run the kernels for the CPU. ``operators`` are described in ``kernelgen.packs.write``;
only programs without Python read them. All of this is checked. Python also reads a pack that is compressed
by xz, as those in folders are.

Packs of format 1 are refused: nothing tells whether their index is as it was written, and most hold kernels of an
older generator, which would not be found.

Packs in ``$EQUITUNE_PACK`` (separated by colons) and those given to :func:`load_pack` come before the cache and the
compiler. Kernels of a pack run with your rights: load only packs that you trust.
"""

from __future__ import annotations

import functools
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

from kernelgen.compile.host import processor_features
from kernelgen.compile.job import Binary, is_whole
from kernelgen.device import DeviceFacts
from kernelgen.errors import PackError, cause_of
from kernelgen.files import parse_json, write_whole
from kernelgen.kernels.source import Source
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
    number = int(facts.arch.removeprefix("sm_"))
    return [*(f"sm_{minor}" for minor in range(number, number // 10 * 10 - 1, -1)), PTX]


def _runs_ptx(facts: DeviceFacts, code: bytes) -> bool:
    """Whether PTX is for this architecture or an older one."""
    found = re.search(rb"\.target sm_(\d{1,9})", code)
    return found is not None and int(found[1]) <= int(facts.arch.removeprefix("sm_"))


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
    try:
        write_whole(path, head + text + bytes(-(_HEAD + len(text)) % _ALIGNMENT) + bytes(code))
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

    def __init__(self, path: str | os.PathLike[str]) -> None:
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


def load_pack(path: str | os.PathLike[str]) -> PackFile:
    """Use the kernels of a pack in this process, before the cache and the compiler.

    Raises PackError if the file is no pack, is damaged, or is for other processors.
    """
    pack = PackFile(path)
    if reason := pack.misfit():
        raise PackError(f"{pack.path} {reason}")
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


# Checks the index of a pack once, when it is opened, so that its readers need not doubt a field.
#
# ``kernelgen/packs/cpp/index_rules.hpp`` says what each field is, and how to read that; the C++ library checks the same
# rules. Beyond them, kernels lie inside of the file, and what a call names by dtype and target is a kernel of that
# target that says how it is run.

_RULES = Path(__file__).resolve().parents[1] / "packs" / "cpp" / "index_rules.hpp"
_MOST = (1 << 53) - 1
_INDICES = ("int32", "int64")
# Places that are valid, by what they are in.
Counts = dict[str, int]


def check_index(index: Any, code_bytes: int) -> None:
    """Raise ValueError that names the place unless the index obeys the rules. code_bytes: of all kernels together."""
    counts = {name: len(_list(index, f"{name}s")) for name in ("kernel", "operator")}
    _check(index, _rules(), "the index", counts)
    for place, kernel in enumerate(index["kernels"]):
        if kernel["offset"] + kernel["size"] > code_bytes:
            raise ValueError(f"kernel {place} is not whole")
    if len({operator["text"] for operator in index["operators"]}) < len(index["operators"]):
        raise ValueError("an operator is there twice")
    for operator in index["operators"]:
        if ("members" in operator) != ("classes" in operator):
            raise ValueError("an operator has members without classes, or classes without members")
        for part in (part for parts in operator["calls"].values() for part in parts):
            for name, place in [*part["kernels"].items(), *part["permuted"].items()]:
                kernel, (dtype, _, target) = index["kernels"][place], name.partition(" ")  # such as ``int64 cpu``
                rule, made_for = "threads" if target == "cpu" else "launch", kernel["target"]
                if dtype not in _INDICES or target != made_for or rule not in kernel:
                    raise ValueError(f"{name!r} of a call is a kernel for {made_for!r}, or one without {rule!r}")


@functools.cache
def _rules() -> Any:
    text = _RULES.read_text(encoding="utf-8")
    return parse_json(text[text.index("(\n{") + 1 : text.rindex("}\n)") + 1])


def _check(value: Any, rule: Any, where: str, counts: Counts) -> None:
    if isinstance(rule, list):
        given = _typed(value, list, where)
        if len(given) < (rule[1] if len(rule) > 1 else 0):
            raise ValueError(f"{where} has {len(given)} items; expected at least {rule[1]}")
        for place, item in enumerate(given):
            _check(item, rule[0], f"{where}[{place}]", counts)
    elif isinstance(rule, dict):
        if "null or" not in rule:
            _check_table(_typed(value, dict, where), rule, where, counts)
        elif value is not None:
            _check(value, rule["null or"], where, counts)
    elif not _is_plain(value, rule, counts):
        raise ValueError(f"{where} is {value!r:.60}; expected {rule}")


def _check_table(table: dict[str, Any], rule: dict[str, Any], where: str, counts: Counts) -> None:
    own = counts | {"member": len(_list(table, "members"))} if "members?" in rule else counts
    known: set[str] = set()
    for names, inner in rule.items():
        optional = names.endswith("?")
        fields = sorted(set(table) - known) if names == "*" else names.removesuffix("?").split("|")
        for name in fields:
            if name in table:
                _check(table[name], inner, f"{where}.{name}", own)
            elif not optional:
                raise ValueError(f"{where} lacks {name!r}")
        known |= set(fields)
    if unknown := sorted(set(table) - known):
        raise ValueError(f"{where} has {unknown[0]!r:.60}, which is unknown")


def _is_plain(value: Any, rule: str, counts: Counts) -> bool:
    kind, _, rest = rule.partition(" ")
    if kind in counts or kind == "whole":
        least, most = (*map(int, rest.split()), _MOST)[:2] if kind == "whole" else (0, counts[kind] - 1)
        return type(value) is int and least <= value <= most
    if kind in ("any", "boolean"):
        return kind == "any" or isinstance(value, bool)
    if not isinstance(value, str):
        return False
    if kind == "letters":
        return set(value) <= set(rest)
    return kind == "text" or value in rest.removeprefix("of ").split("|")


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} is {value!r:.60}; expected a {'list' if kind is list else 'table'}")
    return value


def _list(table: Any, name: str) -> list[Any]:
    """A list of a table, as far as it is one: what is not is found by the rules."""
    found = table.get(name) if isinstance(table, dict) else None
    return found if isinstance(found, list) else []


# Folders of packs: the one that comes with the package, and those in ``$EQUITUNE_PACKS`` (separated by colons).
#
# A folder has packs for Python, compressed by xz, and ``index.json``, by which a kernel is found without opening them:
#
#     {"format": 1, "packs": [{"file": NAME, "target": TARGET, "sources": [first 16 digits of each kernel's source]}]}
#
# ``equitune pack suite`` writes one. Where there is a compiler and a folder for its output, kernels for the CPU are
# compiled for this very processor instead; kernels for GPUs are the same.

INDEX, INDEX_FORMAT = "index.json", 1
_DIGITS = 16
# Of this package; absent in a checkout.
PACKAGED = Path(__file__).resolve().parent.parent / "_packs"


def write_index(folder: Path, packs: Iterable[Path]) -> None:
    """Write the index of a folder's packs, each of one target; kernels are looked for in their order."""
    listed = []
    for path in packs:
        kernels = PackFile(path).index["kernels"]
        for target in sorted({kernel["target"] for kernel in kernels}):
            sources = sorted(kernel["source"][:_DIGITS] for kernel in kernels if kernel["target"] == target)
            listed.append({"file": path.name, "target": target, "sources": sources})
    text = json.dumps({"format": INDEX_FORMAT, "packs": listed}, separators=(",", ":"))
    try:
        write_whole(folder / INDEX, text.encode())
    except OSError as error:
        raise PackError(f"{folder / INDEX} cannot be written ({cause_of(error)}); name another folder") from error


def find_shipped(source: Source, facts: DeviceFacts) -> Binary | None:
    """The kernel of a source from the first folder that has it; None if there is none.

    Raises PackError for a folder or pack that is damaged, and for a folder of ``$EQUITUNE_PACKS`` without an index.
    """
    digest = source_digest(source)[:_DIGITS]
    named = (Path(path).expanduser() for path in os.environ.get("EQUITUNE_PACKS", "").split(os.pathsep) if path)
    for folder in (*named, *([PACKAGED] if (PACKAGED / INDEX).is_file() else [])):
        known = _index(folder)
        for target in targets_for(facts):
            for path in known.get((digest, target), ()):
                pack = _open(path)
                binary = None if pack.misfit() else pack.find(source, facts)
                if binary is not None:
                    return binary
    return None


@functools.lru_cache(maxsize=16)
def _index(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """By source and target, the packs that have the kernel."""
    try:
        data = parse_json(read_plain(folder / INDEX))
        if data["format"] != INDEX_FORMAT:
            raise PackError(f"{folder} has format {data['format']}; this version reads {INDEX_FORMAT}: write it again")
        found: dict[tuple[str, str], list[Path]] = {}
        for pack in data["packs"]:
            if Path(pack["file"]).name != pack["file"]:
                raise ValueError(f"{pack['file']!r} is no file of this folder")
            for source in pack["sources"]:
                found.setdefault((source, pack["target"]), []).append(folder / pack["file"])
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(
            f"{folder / INDEX} cannot be read ({cause_of(error)}); expected a folder of 'equitune pack suite'"
        ) from error


@functools.lru_cache(maxsize=64)
def _open(path: Path) -> PackFile:
    return PackFile(path)
