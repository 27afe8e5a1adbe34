"""Version of the package and of the generator: results record which generator made the kernel they describe."""

from __future__ import annotations

import hashlib
from pathlib import Path

__version__ = "0.1.0"

# What determines the text of a generated kernel; a change in any of these makes a new generator version.
_GENERATOR_MODULES = (
    "modes",
    "problem",
    "spec",
    "terms",
    "direction",
    "body",
    "grouping",
    "ahead",
    "channel_plan",
    "plan",
    "pairs",
    "pair_weights",
    "pair_steps",
    "statements",
    "harmonics",
    "harmonics_schedule",
    "harmonics_plan",
    "harmonics_kernel",
    "harmonics_text",
    "source",
    "signature",
    "cuda_memory",
    "cuda_edge",
    "cuda_group",
    "cuda_ring",
    "cuda_walk",
    "fill",
)
_HEADER_SUFFIXES = (".h", ".hpp", ".cuh", ".inc")


def _generator_digest(folder: Path) -> str:
    chosen = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _HEADER_SUFFIXES
        or (path.suffix == ".py" and (path.stem in _GENERATOR_MODULES or path.stem.startswith("emit")))
    ]
    digest = hashlib.sha256()
    for path in chosen:
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


GENERATOR_VERSION = f"{__version__}+{_generator_digest(Path(__file__).parent)[:10]}"
