"""A folder of packs of the suite's problems: what a module's first calls need, on processors and GPUs of each kind.

A wheel that is built with such a folder as ``packs`` in the tree carries it, see ``kernelgen.build.pack_file``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import lzma
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autotune import paths
from autotune.cli.packs.certificates import certificates
from autotune.cli.packs.of_problem import calls_of, card_of
from autotune.errors import ConfigError, unknown_name
from autotune.workload.config import load_all
from autotune.workload.kinds.registry import operations_of
from autotune.workload.toml_tables import read_toml
from kernelgen.build.host import LEVELS, features_of
from kernelgen.build.pack_file import PackFile, write_index
from kernelgen.device import DeviceFacts, assumed, device_facts
from kernelgen.errors import PackError, cause_of
from kernelgen.packs.write import Content, write_content
from kernelgen.problem.product import TensorProductProblem
from kernelgen.version import GENERATOR_VERSION

LAYOUTS = ("mul_ir", "ir_mul")
# The name in a suite of the kernels at nodes, which are of no problem.
NODES = "nodes"


class Kernels(NamedTuple):
    """What one pack is for: a problem by name, as a module computes it."""

    problem: str
    operation: str
    dtype: str
    layout: str


def suite(name: str | None = None) -> list[Kernels]:
    """The products of ``configs/suite.toml`` in both layouts, and the named harmonics and contractions in float32.

    Also the kernels at nodes of GPUs, as ``nodes``. name: of one problem of these; ConfigError if it is none.
    """
    config = read_toml(paths.configs_dir() / "suite.toml")
    found = [
        Kernels(problem, work["operation"], work["dtype"], layout)
        for work in config["workload"]
        if not work.get("deterministic")
        for problem in work.get("problem", config["problem"])
        for layout in LAYOUTS
    ]
    for other, problem in load_all().items():
        operation = operations_of(problem)[0]
        if not isinstance(problem, TensorProductProblem) and operation != "vectors":
            found += [Kernels(other, operation, "float32", "ir_mul" if operation == "contraction" else "mul_ir")]
    found += [Kernels(NODES, "rows", dtype, "ir_mul") for dtype in ("float32", "float64")]
    some = [kernels for kernels in found if name in (None, kernels.problem)]
    if not some:
        raise ConfigError(unknown_name("problem of the suite", str(name), {one.problem: one for one in found}))
    return some


def write_suite(
    folder: Path, some: Sequence[Kernels], archs: Sequence[str], levels: Sequence[str], training: bool = False
) -> Iterator[tuple[Path, int]]:
    """Write a pack for some kernels on each target, and the folder's index; yields each pack with its kernels.

    archs: of GPUs, the last one also as PTX. levels: of processors. training: also second derivatives. A pack that is
    there already is kept if this version of the generator made it. PackError if a file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(f"{folder} cannot be made ({cause_of(error)}); name another folder") from error
    # Of processors the newest first: its kernels run on no older one, but for the same text they are the faster ones.
    targets = [(level, processor(level)) for level in reversed(levels)] + [(arch, card_of(arch)) for arch in archs]
    written = []
    for target, facts in targets:
        for kernels in some:
            if kernels.problem == NODES and facts.backend != "cuda":
                continue
            path = folder / f"{'-'.join(kernels)}-{target}.pack.xz"
            written.append(path)
            yield path, _write(path, kernels, target, facts, training, ptx=[target] == list(archs[-1:]))
    write_index(folder, written)


def processor(level: str) -> DeviceFacts:
    """The facts of this machine's processor as one of a level, whose features alone count."""
    here = device_facts("cpu")
    features = features_of(level)
    width = 64 if "avx512f" in features else 32 if "avx2" in features else 16
    return here if level not in LEVELS.get(platform.machine(), {}) else dataclasses.replace(here, vector_bytes=width)


def _write(path: Path, kernels: Kernels, target: str, facts: DeviceFacts, training: bool, ptx: bool) -> int:
    with contextlib.suppress(PackError):  # none yet, of an older format, or damaged
        index = PackFile(path).index
        if index["generator"] == GENERATOR_VERSION:
            return len(index["kernels"])
    on_gpu = facts.backend == "cuda"
    with assumed(facts):
        content = Content(gpus=(facts,) if on_gpu else (), ptx=ptx, certificates=certificates())
        if kernels.problem == NODES:
            content.add_for_nodes(kernels.dtype)
        else:
            for call in calls_of(*kernels, archs=(facts.arch,) if on_gpu else (), training=training):
                content.add(call)
        content.operators.clear()  # Python knows a kernel by its source
        made = write_content(content, path.with_suffix(""), target if not on_gpu else None)
    try:
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(lzma.compress(made.path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
        fresh.replace(path)
        made.path.unlink()
    except OSError as error:
        raise PackError(f"{path} cannot be written ({cause_of(error)}); name another folder") from error
    return made.kernels
