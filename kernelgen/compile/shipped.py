"""Folders of packs: the one that comes with the package, and those in ``$EQUITUNE_PACKS`` (separated by colons).

A folder has packs for Python, compressed by xz, and ``index.json``, by which a kernel is found without opening them:

    {"format": 1, "packs": [{"file": NAME, "target": TARGET, "sources": [the first 16 digits of each kernel's source]}]}

``equitune pack --suite`` writes one. Where there is a compiler and a folder for its output, kernels for the CPU are
compiled for this very processor instead; kernels for GPUs are the same.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from pathlib import Path

from kernelgen.compile.cache import Binary
from kernelgen.compile.pack_file import PackFile, read_plain, source_digest, targets_for
from kernelgen.device import DeviceFacts
from kernelgen.emit.source import Source
from kernelgen.errors import PackError, cause_of
from kernelgen.json_data import parse_json

INDEX, FORMAT = "index.json", 1
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
    fresh = folder / f".{INDEX}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps({"format": FORMAT, "packs": listed}, separators=(",", ":")))
        fresh.replace(folder / INDEX)
    except OSError as error:
        raise PackError(f"{folder / INDEX} cannot be written ({cause_of(error)}); name another folder") from error


def find_shipped(source: Source, facts: DeviceFacts) -> Binary | None:
    """The kernel of a source from the first folder that has it; None if there is none.

    Raises PackError for a folder or pack that is damaged, and for a folder of ``$EQUITUNE_PACKS`` without an index.
    """
    digest = source_digest(source)[:_DIGITS]
    for folder in _folders():
        known = _index(folder)
        for target in targets_for(facts):
            for path in known.get((digest, target), ()):
                pack = _open(path)
                binary = None if pack.misfit() else pack.find(source, facts)
                if binary is not None:
                    return binary
    return None


def _folders() -> list[Path]:
    named = [Path(path).expanduser() for path in os.environ.get("EQUITUNE_PACKS", "").split(os.pathsep) if path]
    return [*named, *([PACKAGED] if (PACKAGED / INDEX).is_file() else [])]


@functools.lru_cache(maxsize=16)
def _index(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """By source and target, the packs that have the kernel."""
    try:
        data = parse_json(read_plain(folder / INDEX))
        if data["format"] != FORMAT:
            raise PackError(f"{folder} has format {data['format']}; this version reads {FORMAT}: write it again")
        found: dict[tuple[str, str], list[Path]] = {}
        for pack in data["packs"]:
            if Path(pack["file"]).name != pack["file"]:
                raise ValueError(f"{pack['file']!r} is no file of this folder")
            for source in pack["sources"]:
                found.setdefault((source, pack["target"]), []).append(folder / pack["file"])
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(
            f"{folder / INDEX} cannot be read ({cause_of(error)}); expected a folder of 'equitune pack --suite'"
        ) from error


@functools.lru_cache(maxsize=64)
def _open(path: Path) -> PackFile:
    return PackFile(path)
