"""Writes the kernels of calls as a pack: for processors of a level, and for each architecture of GPUs that is named.

The calls are those of an exported model, of problems, or of all kernels that a process runs while it records.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernelgen.compile.compiler import RECORDERS, compile_by
from kernelgen.compile.gpu import cuda_job, ptx_job
from kernelgen.compile.host import default_level, features_of, portable_job
from kernelgen.compile.job import Job
from kernelgen.compile.pack_file import PTX, source_digest, target_of, write_pack
from kernelgen.device import DeviceFacts, assumed, cuda_facts
from kernelgen.errors import InputError, PackError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.dispatch import AnyPlan, emit, launch_rule
from kernelgen.kernels.source import Source
from kernelgen.ops import edge_networks as networks
from kernelgen.ops import edge_networks as tall_matrices
from kernelgen.ops import gates
from kernelgen.ops import node_matrices as matrices
from kernelgen.ops.base import resolve
from kernelgen.ops.symmetric_contraction import sums_source
from kernelgen.packs.calls import INDICES, Call, Launch, launches, needs
from kernelgen.runtime import graph as index_check
from kernelgen.runtime.kernel import host_threads
from kernelgen.version import GENERATOR_VERSION, __version__

# Writes the kernels of calls as a pack: for processors of a level, and for each architecture of GPUs that is named.


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


# What a pack will have: operators with their calls, and the sources of kernels, in the order in which they are met.


@dataclass
class Content:
    """indices: dtypes of edge indices. gpus: the devices to compile for, from the oldest architecture to the newest.

    ptx: also the newest one's PTX. certificates: what is known of a kernel's errors, by the first 16 digits of the
    hash of its source; written with it as ``certificate``.
    """

    indices: tuple[str, ...] = ("int64",)
    gpus: tuple[DeviceFacts, ...] = ()
    ptx: bool = True
    certificates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)
    _places: dict[Any, int] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """A call with all of its kernels; of a family with those of each member."""
        with assumed(self.gpus[-1]) if self.gpus else contextlib.nullcontext():
            operator = resolve(call.text)
        if operator.device.type == "cuda" and not self.gpus:
            raise InputError("the model runs on a GPU; name architectures to compile for, such as --arch sm_90")
        if not operator.members:
            self._add_to(operator, call)
            return
        places = [
            self._add_to(member, Call(call.op, member.text, call.tangents, call.outputs)) for member in operator.members
        ]
        entry = self.operators[self._operator(operator)]
        entry |= {"members": places, "classes": [list(row) for row in operator.classes]}

    def add_for_nodes(self, dtype: str) -> None:
        """The kernels that Python launches at nodes and for the edges' weights, on each architecture.

        dtype: float32 or float64, in which products of edges stay torch's.
        """
        for source in (*node_sources(dtype), *(edge_sources() if dtype == "float32" else ())):
            self.on_gpus(source)

    def on_gpus(self, source: Source) -> None:
        """A source's kernel, on each architecture."""
        for facts in self.gpus:
            for target in self._targets(facts):
                if has_target(source, target):
                    self.kernel(source, target)

    def kernel(self, source: Source, target: str, about: Mapping[str, Any] | None = None) -> int:
        """The place of a source's kernel. about: more to write of it."""
        key = (source_digest(source), source.entry, target)
        if key not in self._places:
            self._places[key] = len(self.kernels)
            self._sources.append(source)
            known = self.certificates.get(key[0][:16])
            told = {"certificate": known} if known else {}
            self.kernels.append({"source": key[0], "entry": key[1], "target": target, **(about or {}), **told})
        return self._places[key]

    def compiled(self, level: str) -> list[bytes]:
        """The code of each kernel, compiled at the same time on all cores. level: of processors."""
        jobs = [
            self._job(kernel["target"], source, level)
            for kernel, source in zip(self.kernels, self._sources, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = [pool.submit(compile_by, *each) for each in zip(jobs, self._sources, strict=True)]
            binaries = [future.result() for future in made]
        for facts, job, binary in zip(self.kernels, jobs, binaries, strict=True):
            facts |= {"resources": binary.resources, "compiler": job.identity}
        return [binary.path.read_bytes() for binary in binaries]

    def _job(self, target: str, source: Source, level: str) -> Job:
        if target == "cpu":
            return portable_job(level)
        return ptx_job(self.gpus[-1].arch) if target == PTX else cuda_job(target + source.arch_suffix)

    def _operator(self, operator: Any) -> int:
        if operator.text not in self._places:
            self._places[operator.text] = len(self.operators)
            self.operators.append({"text": operator.text, "needs": needs(operator), "calls": {}})
        return self._places[operator.text]

    def _add_to(self, operator: Any, call: Call) -> int:
        place = self._operator(operator)
        known = self.operators[place]["calls"]
        if call.op != "tp_order" and call.name not in known:
            if operator.device.type == "cuda":
                known[call.name] = self._on_gpus(operator, call)
            else:
                known[call.name] = [self._launch(one, ("cpu",)) for one in launches(operator, call, self.indices)]
        return place

    def _on_gpus(self, operator: Any, call: Call) -> list[dict[str, Any]]:
        """A call's launches, with the kernels of all architectures."""
        found: list[dict[str, Any]] = []
        for index in self.indices:  # what Python checks the indices of a graph with
            self.on_gpus(index_check.source_of(index))
        for facts in self.gpus:
            with assumed(facts):
                made = [self._launch(one, self._targets(facts)) for one in launches(operator, call, self.indices)]
            for first, more in zip(found or made, made, strict=True):
                if {**first, "kernels": 0, "permuted": 0} != {**more, "kernels": 0, "permuted": 0}:
                    raise PackError(f"{call.name} is launched otherwise on {facts.arch}; write a pack for it alone")
                first["kernels"] |= more["kernels"]
                first["permuted"] |= more["permuted"]
            found = found or made
        return found

    def _targets(self, facts: DeviceFacts) -> tuple[str, ...]:
        return (facts.arch, PTX) if self.ptx and facts is self.gpus[-1] else (facts.arch,)

    def _launch(self, launch: Launch, targets: tuple[str, ...]) -> dict[str, Any]:
        def places(plans: dict[str, AnyPlan]) -> dict[str, int]:
            found = {(index, target): self._of_plan(plans[index], target) for index in plans for target in targets}
            return {" ".join(key): place for key, place in found.items() if place is not None}

        kernels = places(launch.plans)
        if launch.fixed is not None:
            source, rule = launch.fixed
            about = {"launch": rule.to_dict()}
            kernels |= {f"int64 {target}": self.kernel(source, target, about) for target in targets}
        return launch.facts | {"kernels": kernels, "permuted": places(launch.permuted)}

    def _of_plan(self, plan: AnyPlan, target: str) -> int | None:
        """The place of its kernel; None if it has none for the target."""
        spec, source = plan.spec, emit(plan)
        if not has_target(source, target):
            return None
        about: dict[str, Any] = {
            "problem": spec.problem.key,
            "direction": spec.direction.text,
            "schedule": spec.schedule.key,
            "dtype": spec.dtype,
        }
        if spec.facts.backend == "cuda":
            about["launch"] = launch_rule(plan).to_dict()
        else:
            fixed, rows = host_threads(spec)
            about["threads"] = {"fixed": fixed, "rows_of_each": rows}
        return self.kernel(source, target, about)


def has_target(source: Source, target: str) -> bool:
    """Whether a source can be compiled for a target: PTX is for all later GPUs, which one architecture's is not."""
    return target != PTX or not source.arch_suffix


# Kernels for GPUs whose text no schedule decides, which Python launches beside those of operators.

# Features of an edge at which the packages' radial networks end.
HIDDEN = (8, 16, 32, 64, 128)
# Hidden features and layers of the packages' radial networks: MACE's three, SevenNet's two, NequIP's one or two.
NETWORKS = ((64, 1), (64, 2), (64, 3), (128, 1))


def node_sources(dtype: str) -> Iterator[Source]:
    """In float32 or float64: linear layers and products by element, gates, sums by element; and SiLU of edges."""
    of_torch = getattr(torch, dtype)
    yield from (matrices.source(of_torch, of_weights) for of_weights in (False, True))
    yield gates.source(of_torch)
    yield sums_source(of_torch)
    yield networks.silu_kernel(of_torch).source


def edge_sources() -> Iterator[Source]:
    """Products of edges with the last matrix of the usual radial networks, and their hidden layers, in float32."""
    yield from tall_matrices.product_sources(HIDDEN)
    yield from networks.network_sources(NETWORKS)


# The calls of Equitune's operators in an exported model, read from its file without loading it.
#
# A package of AOTInductor names them in the JSON of the calls that it leaves to torch's dispatcher; a program of
# ``torch.export.save`` names them in its graph. Both are zip archives, and both write a call as a ``target`` and its
# ``inputs`` by name.

_TANGENTS = ("tx", "ty", "tw")


def calls_in(path: str | os.PathLike) -> list[Call]:
    """The different calls of a ``.pt2`` file, in their order. PackError if it is none, or has no such calls."""
    found: dict[Call, None] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.endswith(".json"):
                    found |= dict.fromkeys(_calls(parse_json(archive.read(name))))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise PackError(
            f"{Path(path)} cannot be read ({cause_of(error)}); expected a .pt2 file of torch.export.save or "
            "torch._inductor.aoti_compile_and_package"
        ) from error
    if not found:
        raise PackError(f"{Path(path)} calls no operator of Equitune; export the model after accelerate(model)")
    return list(found)


def _calls(data: Any) -> Iterator[Call]:
    """All calls in the JSON of a file, at whatever depth."""
    if isinstance(data, list):
        for one in data:
            yield from _calls(one)
    elif isinstance(data, dict):
        target = data.get("target")
        if isinstance(target, str) and "equitune" in target and isinstance(data.get("inputs"), list):
            yield _call(target, data["inputs"])
        else:
            for one in data.values():
                yield from _calls(one)


def _call(target: str, inputs: list[dict[str, Any]]) -> Call:
    """The call of ``torch.ops.equitune.tp_forward.default`` or ``equitune::tp_forward``."""
    op = target.replace("::", ".").split("equitune.")[-1].split(".")[0]
    arguments = {given["name"]: given["arg"] for given in inputs}
    tangents = "".join(name[1] for name in _TANGENTS if _is_given(arguments.get(name)))
    outputs = arguments.get("outputs", {}).get("as_string", "")
    return Call(op, arguments["spec"]["as_string"], tangents, outputs)


def _is_given(argument: dict[str, Any] | None) -> bool:
    """Whether an optional tensor is there: neither left out nor None."""
    if argument is None or "as_none" in argument:
        return False
    inner = argument.get("as_optional_tensor")
    return inner is None or "as_none" not in inner


# A pack of the kernels that this process compiles or finds while it records.


class Recording:
    """``written``: what :func:`recording` wrote at its end."""

    written: Written


@contextmanager
def recording(
    path: str | os.PathLike,
    *,
    cpu: str | None = None,
    archs: Sequence[str] = (),
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
) -> Iterator[Recording]:
    """Write a pack of the kernels that are loaded inside of the ``with``.

        with recording("my.pack"):
            model(batch)

    Kernels that the process loaded before are not in it: record in a new process. A GPU's kernels are compiled for its
    own architecture and for ``archs``, the newest also as PTX. Another card finds them if it would run the same
    schedules. cpu: as of ``equitune pack``. certificates: see ``kernelgen.packs.write.Content``. Raises
    InputError if no kernel was loaded, and what ``write_calls`` raises.
    """
    recorded = Recording()
    noted: list[tuple[Source, DeviceFacts]] = []

    def note(source: Source, facts: DeviceFacts) -> None:
        if not facts.is_hip:
            noted.append((source, facts))

    RECORDERS.append(note)
    try:
        yield recorded
    finally:
        RECORDERS.remove(note)
    if not noted:
        raise InputError("no kernel was loaded: run the model inside of recording, in a new process")
    own = {target_of(facts) for _, facts in noted if facts.backend == "cuda"}
    gpus = tuple(cuda_facts(arch) for arch in sorted({*archs, *own}, key=arch_number)) if own else ()
    content = Content(gpus=gpus, certificates=certificates or {})
    for source, facts in noted:
        if facts.backend == "cuda":
            content.on_gpus(source)
        else:
            content.kernel(source, target_of(facts))
    recorded.written = write_content(content, Path(path), cpu)
