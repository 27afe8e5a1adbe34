"""What ``torch.compile`` made stays on the disk beside our kernels, with notes of the products that need no more work.

A process that compiles one of e3nn's products again takes its code from there: it traces (seconds) and compiles
nothing. A note says that a product's code is there, or that torch.compile ran into its time limit, so that a command
that is started again neither waits for it nor tries again. Notes lie in torch's own cache and vanish with it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from contextlib import suppress
from pathlib import Path

from kernelgen.compile.cache import cache_dir, digest
from kernelgen.device import device_facts
from kernelgen.files import parse_json

# What torch.compile's code depends on.
COMPILERS = ("torch", "triton", "e3nn", "cuequivariance-torch")
FOLDER = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled() -> Path:
    """Have torch keep its code beside our kernels, unless the user says where; returns that folder.

    Triton's kernels lie in the same folder.
    """
    folder = cache_dir() / "torch"
    if os.environ.get(FOLDER) in (None, _torchs_own()):
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ[FOLDER] = str(folder)
    return Path(os.environ.get(FOLDER, folder))


def _torchs_own() -> str | None:
    """The folder that torch chooses, and writes to the environment when its compiler is first imported."""
    try:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    except ImportError:
        return None
    return str(default_cache_dir())


def take_note(product: tuple[str, ...], device: str, reason: str) -> None:
    """Note that what a product's peers compile is on the disk, or the reason why it will never be."""
    path = _path(product, device)
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.stem}.{os.getpid()}")
        fresh.write_text(json.dumps({"product": product, "reason": reason}), encoding="utf-8")
        fresh.replace(path)


def noted(product: tuple[str, ...], device: str) -> str | None:
    """The reason that a note gives, empty for code on the disk; None without a note that can be read."""
    try:
        reason = parse_json(_path(product, device).read_bytes())["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return reason if isinstance(reason, str) else None


def _path(product: tuple[str, ...], device: str) -> Path:
    versions = [platform.python_version()]
    for name in COMPILERS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return keep_compiled() / "equitune-notes" / f"{digest(*product, device_facts(device).slug, *versions)}.json"
