"""Compiled kernels on disk: a key enters, a verified entry leaves, or nothing.

An entry is a directory named by its key with the binary, the source it came from and ``entry.json`` (resources and
the binary's hash). It is written beside its final place and published by one rename, so processes that compile the
same kernel at once each see a whole entry or none. An entry whose hash disagrees (torn, truncated, edited) is
dropped and compiled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from kernelgen.errors import ToolMissingError


@dataclass(frozen=True)
class Binary:
    """A compiled kernel on disk; ``resources`` is what the compiler said it takes (registers, bytes of code, ...)."""

    path: Path
    resources: dict[str, Any]


def cache_dir() -> Path:
    """``$EQUITUNE_CACHE`` or the platform's cache directory."""
    chosen = os.environ.get("EQUITUNE_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("equitune"))


def digest(*parts: str) -> str:
    """Key of an entry: sha256 over the parts, which cannot run into each other."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode()
        total.update(f"{len(data)}:".encode())
        total.update(data)
    return total.hexdigest()


def find(key: str, binary_name: str) -> Binary | None:
    """The entry of ``key``, or None if there is none or it is damaged."""
    folder = _folder(key)
    try:
        entry = json.loads((folder / "entry.json").read_text())
        data = (folder / binary_name).read_bytes()
        if entry["sha256"] != hashlib.sha256(data).hexdigest():
            return None
        return Binary(folder / binary_name, dict(entry["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def publish(key: str, binary_name: str, binary: bytes, source_name: str, source: str, resources: dict) -> Binary:
    """Store a compiled kernel; of several processes that store the same key, one entry stays."""
    folder = _folder(key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    except OSError as error:
        raise ToolMissingError(
            f"the kernel cache {cache_dir()} cannot be written ({error}); set EQUITUNE_CACHE to a writable directory"
        ) from error
    try:
        (fresh / binary_name).write_bytes(binary)
        (fresh / source_name).write_text(source)
        entry = {"sha256": hashlib.sha256(binary).hexdigest(), "resources": resources}
        (fresh / "entry.json").write_text(json.dumps(entry, indent=1, sort_keys=True))
        _rename_into_place(fresh, folder, key, binary_name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return Binary(folder / binary_name, resources)


def _rename_into_place(fresh: Path, folder: Path, key: str, binary_name: str) -> None:
    for _ in range(10):
        try:
            os.rename(fresh, folder)
            return
        except OSError:
            if find(key, binary_name) is not None:
                return  # another process was first; its entry serves as well
            # A damaged entry is in the way: move it aside in one step, then try again.
            aside = Path(tempfile.mkdtemp(prefix=".old-", dir=folder.parent))
            try:
                os.rename(folder, aside)
            except OSError:
                pass  # another process moved it first
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    raise ToolMissingError(f"the kernel cache entry {folder} cannot be replaced; remove it or set EQUITUNE_CACHE")


def _folder(key: str) -> Path:
    return cache_dir() / key[:2] / key
