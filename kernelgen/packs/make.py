"""Writes the kernels of calls as a pack: for processors of a level, and for each architecture of GPUs that is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernelgen.compile.host import default_level, features_of
from kernelgen.compile.pack_file import write_pack
from kernelgen.device import cuda_facts
from kernelgen.errors import InputError
from kernelgen.packs.calls import INDICES, Call
from kernelgen.packs.content import Content
from kernelgen.version import GENERATOR_VERSION, __version__


@dataclass(frozen=True)
class Written:
    """A pack that was written: its file, and the numbers of its kernels, operators and bytes.

    certified: kernels with a certificate.
    """

    path: Path
    kernels: int
    certified: int
    operators: int
    size: int


def write_calls(
    calls: Iterable[Call],
    path: str | os.PathLike,
    *,
    cpu: str | None = None,
    archs: Sequence[str] = (),
    indices: Sequence[str] = ("int64",),
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
    nodes: Sequence[str] = (),
) -> Written:
    """Compile all kernels of some calls and write them to a pack.

    cpu: the level of processors, see ``kernelgen.compile.host.LEVELS``, or ``native``. archs: architectures of GPUs
    such as ``sm_90``, for operators on GPUs; the newest is also written as PTX, for later ones. indices: dtypes of
    sender and receiver. certificates: see :class:`Content`. nodes: dtypes of features whose kernels at nodes of GPUs
    are also written, for programs in Python. Raises CompileError, ToolMissingError without g++ or NVRTC, ScheduleError
    for a schedule that an architecture cannot run, and PackError if the file cannot be written.
    """
    unknown = sorted(set(indices) - set(INDICES))
    if unknown or not indices:
        raise InputError(f"indices are {tuple(indices)}; expected some of {tuple(INDICES)}")
    gpus = tuple(cuda_facts(arch) for arch in sorted(archs, key=arch_number))
    content = Content(tuple(indices), gpus, certificates=certificates or {})
    for call in calls:
        content.add(call)
    for dtype in nodes:
        content.add_for_nodes(dtype)
    return write_content(content, Path(path), cpu)


def arch_number(arch: str) -> int:
    """Such as 90 of ``sm_90``, to sort by."""
    return int("".join(c for c in arch if c.isdigit()) or 0)


def write_content(content: Content, path: Path, cpu: str | None) -> Written:
    """Compile the kernels of a pack and write it."""
    level = cpu or default_level()
    features = features_of(level)
    codes = content.compiled(level)
    on_cpu = any(kernel["target"] == "cpu" for kernel in content.kernels)
    index = {
        "equitune": __version__,
        "generator": GENERATOR_VERSION,
        "torch": torch.__version__,
        "machine": os.uname().machine if on_cpu else "",
        "cpu": level if on_cpu else "",
        "features": features if on_cpu else (),
        "kernels": content.kernels,
        "operators": content.operators,
    }
    write_pack(path, json.loads(json.dumps(index)), codes)
    certified = sum("certificate" in kernel for kernel in content.kernels)
    return Written(path, len(content.kernels), certified, len(content.operators), path.stat().st_size)
