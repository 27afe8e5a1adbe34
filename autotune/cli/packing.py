"""What ``equitune pack`` writes: packs of a model that runs, of a problem, of all shipped configs; with
certificates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import lzma
import platform
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autotune import paths
from autotune.database.store import database_dirs, device_files, load_table
from autotune.errors import ConfigError, unknown_name
from autotune.modules.base import Found, Lookup
from autotune.modules.rows import build_rows
from autotune.tune.model_passes import open_named
from autotune.workload.config import find_problem, load_all
from autotune.workload.known_kinds import operations_of
from autotune.workload.toml_tables import read_toml
from kernelgen.compile.host import LEVELS, features_of
from kernelgen.compile.pack_file import PackFile, write_index
from kernelgen.device import CUDA_ARCHS, DeviceFacts, assumed, cuda_facts, device_facts, representative
from kernelgen.errors import InputError, PackError, ScheduleError, cause_of
from kernelgen.ops.product import Operator, build
from kernelgen.packs.write import Call, Content, Written, launches, recording, write_content
from kernelgen.problem.product import TensorProductProblem
from kernelgen.version import GENERATOR_VERSION

# A pack of the kernels that a model runs, found by running it.


def write_of_model(
    model: str,
    structure: str | None,
    path: Path,
    *,
    dtype: str | None,
    training: bool,
    cpu: str | None,
    archs: Sequence[str] = (),
) -> Written:
    """Open, accelerate and run a model (as ``equitune tune model``), and write its kernels.

    On the CPU, or with ``archs`` on this machine's GPU, whose kernels are then compiled for each of them and for the
    GPU itself. ConfigError if there is none.
    """
    if archs and not torch.cuda.is_available():
        raise ConfigError(
            f"--arch {','.join(archs)}: the kernels of a model are found by running it, and this machine has no GPU; "
            "pack the model where there is one, or its problems by name"
        )
    with recording(path, cpu=cpu, archs=archs, certificates=certificates()) as recorded:
        # Replaced modules are compared with the package's own, which loads kernels too.
        opened = open_named(model, structure, "cuda" if archs else "cpu", dtype, training)
        for run in opened.passes.values():
            run()
    return recorded.written


# The calls of a problem's operator: values and first gradients, with the schedules that a module would load here.

# Second derivatives that a loss on energies and forces takes: those of dF/dy, of dF/dx and dF/dy, with the value's.
_TRAINING = (
    *(("y", outputs) for outputs in ("xwg", "xw", "wg")),
    *(("xy", "xywg"), ("xyw", "xywg")),
    *(("yg", outputs) for outputs in ("xyw", "xw", "w")),
)


def calls_of(
    text: str, operation: str, dtype: str, layout: str, *, archs: Sequence[str] = (), training: bool = False
) -> list[Call]:
    """The calls of a problem (its name or key), on the CPU, or with ``archs`` on a GPU.

    A GPU's schedules are those for the first architecture. InputError for another dtype than float32 and float64.
    """
    problem = find_problem(text)
    if dtype not in ("float32", "float64"):
        raise InputError(f"dtype is {dtype!r}; expected float32 or float64")
    device, of_torch = torch.device("cuda" if archs else "cpu"), getattr(torch, dtype)
    with assumed(card_of(archs[0])) if archs else nullcontext():
        if not isinstance(problem, TensorProductProblem):
            operation = operations_of(problem)[0]
            lookup = Lookup(problem, operation, layout, device, of_torch)
            rows = lookup.family(lambda found: build_rows(problem, layout, device, of_torch, found))
            return _of_rows(operation, rows.text, training)

        def made(found: Found) -> Operator:
            options = {"operation": operation, "dtype": of_torch, "layout": layout}
            return build(problem, found.schedules, device=device, refused=found.refused, **options)

        operator = Lookup(problem, operation, layout, device, of_torch).family(made)
        calls = [Call("tp_forward", operator.text)]
        some = ("".join(slots) for count in (1, 2, 3) for slots in combinations("xyw", count))
        calls += [Call("tp_backward", operator.text, "", outputs) for outputs in some]
        if training:
            calls += [Call("tp_double_backward", operator.text, *of) for of in _TRAINING]
        return [call for call in calls if all(_is_legal(one, call) for one in operator.members or (operator,))]


def card_of(arch: str) -> DeviceFacts:
    """The card that stands for an architecture, for which schedules may have been tuned."""
    return representative(arch) if arch in CUDA_ARCHS else cuda_facts(arch)


def _is_legal(operator: Operator, call: Call) -> bool:
    """Whether the direction's schedule allows these outputs: knobs may be about an operand that they do not read."""
    try:
        launches(operator, call, ("int64",))
    except ScheduleError:
        return False
    return True


def _of_rows(operation: str, text: str, training: bool) -> list[Call]:
    if operation == "harmonics":
        second = [Call("sh_double_backward", text, "", outputs) for outputs in ("xg", "x", "g")]
        return [Call("sh_forward", text), Call("sh_backward", text), *(second if training else ())]
    return [Call("sc_forward", text), Call("sc_backward", text, "", "x")]


# A folder of packs of the suite's problems: what a module's first calls need, on processors and GPUs of each kind.
#
# A wheel that is built with such a folder as ``packs`` in the tree carries it, see ``kernelgen.compile.pack_file``.

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


# What the tuned databases tell of kernels that were checked, for the kernels that a pack has.


def certificates() -> dict[str, dict[str, Any]]:
    """By the first 16 digits of a kernel's source: its errors against float64 e3nn and under rotation, and the run.

    From entries with a certificate; see ``autotune.database.entry.Entry`` for the fields.
    """
    found = {}
    for folder in database_dirs():
        for path in device_files(folder):
            table = load_table(path)
            for entry in table.by_identity.values():
                if entry.source and entry.certificate:
                    told = {
                        name: getattr(entry, name) for name in ("errors", "tolerance", "date", "generator", "graph")
                    }
                    told["device"] = table.device.get("name", path.stem)
                    found[entry.source] = {**entry.certificate, **told}
    return found
