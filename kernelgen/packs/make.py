"""Compiles the kernels of calls and writes them as a pack."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernelgen.compile.compiler import compile_by
from kernelgen.compile.job import Job
from kernelgen.compile.pack_file import source_digest, target_of, write_pack
from kernelgen.compile.portable import default_level, features_of, portable_job
from kernelgen.device import DeviceFacts
from kernelgen.emit.kernel_source import emit
from kernelgen.emit.source import Source
from kernelgen.errors import InputError
from kernelgen.ops.registry import resolve
from kernelgen.packs.calls import INDICES, Call, Launch, launches, needs
from kernelgen.plan.planner import AnyPlan
from kernelgen.runtime.kernel import host_threads
from kernelgen.version import GENERATOR_VERSION, __version__


@dataclass(frozen=True)
class Written:
    """A pack that was written: its file, and the numbers of its kernels, operators and bytes."""

    path: Path
    kernels: int
    operators: int
    size: int


def write_calls(
    calls: Iterable[Call], path: str | os.PathLike, *, cpu: str | None = None, indices: Sequence[str] = ("int64",)
) -> Written:
    """Compile all kernels of some calls and write them to a pack.

    cpu: the level of processors, see ``kernelgen.compile.portable.LEVELS``, or ``native``. indices: dtypes of sender
    and receiver. Raises CompileError, ToolMissingError without g++, and PackError if the file cannot be written.
    """
    unknown = sorted(set(indices) - set(INDICES))
    if unknown or not indices:
        raise InputError(f"indices are {tuple(indices)}; expected some of {tuple(INDICES)}")
    content = Content(tuple(indices))
    for call in calls:
        content.add(call)
    return write_content(content, Path(path), cpu)


def write_content(content: Content, path: Path, cpu: str | None) -> Written:
    """Compile the kernels of a pack for a level of processors and write it."""
    level = cpu or default_level()
    job = portable_job(level)
    codes = content.compiled(job)
    index = {
        "equitune": __version__,
        "generator": GENERATOR_VERSION,
        "torch": torch.__version__,
        "machine": os.uname().machine,
        "cpu": level,
        "compiler": job.identity,
        "features": features_of(level),
        "kernels": content.kernels,
        "operators": content.operators,
    }
    write_pack(path, index, codes)
    return Written(path, len(content.kernels), len(content.operators), path.stat().st_size)


@dataclass
class Content:
    """What a pack will have, in the order in which it is met."""

    indices: tuple[str, ...] = ("int64",)
    kernels: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    _sources: list[Source] = field(default_factory=list)
    _places: dict[Any, int] = field(default_factory=dict)

    def add(self, call: Call) -> None:
        """A call with all of its kernels; of a family with those of each member."""
        operator = resolve(call.text)
        members = getattr(operator, "members", None)
        if members is None:
            self._add_to(operator, call)
            return
        places = [self._add_to(member, Call(call.op, member.text, call.tangents, call.outputs)) for member in members]
        entry = self.operators[self._operator(operator)]
        entry |= {"members": places, "classes": [list(row) for row in operator.classes]}

    def compiled(self, job: Job) -> list[bytes]:
        """The code of each kernel, compiled at the same time on all cores."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            binaries = list(pool.map(lambda source: compile_by(job, source), self._sources))
        for facts, binary in zip(self.kernels, binaries, strict=True):
            facts["resources"] = binary.resources
        return [binary.path.read_bytes() for binary in binaries]

    def _operator(self, operator: Any) -> int:
        if operator.text not in self._places:
            self._places[operator.text] = len(self.operators)
            self.operators.append({"text": operator.text, "needs": needs(operator)})
        return self._places[operator.text]

    def _add_to(self, operator: Any, call: Call) -> int:
        place = self._operator(operator)
        known = self.operators[place].setdefault("calls", {})
        if call.op != "tp_order" and call.name not in known:
            known[call.name] = [self._launch(launch) for launch in launches(operator, call, self.indices)]
        return place

    def _launch(self, launch: Launch) -> dict[str, Any]:
        places = {f"{index} {target_of(plan.spec.facts)}": self._of_plan(plan) for index, plan in launch.plans.items()}
        return launch.facts | {"kernels": places}

    def _of_plan(self, plan: AnyPlan) -> int:
        spec = plan.spec
        fixed, rows = host_threads(spec)
        about = {
            "problem": spec.problem.key,
            "direction": spec.direction.text,
            "schedule": spec.schedule.key,
            "dtype": spec.dtype,
            "threads": {"fixed": fixed, "rows_of_each": rows},
        }
        return self.kernel(emit(plan), spec.facts, about)

    def kernel(self, source: Source, facts: DeviceFacts, about: Mapping[str, Any] | None = None) -> int:
        """The place of a source's kernel. about: more to write of it."""
        key = (source_digest(source), source.entry, target_of(facts))
        if key not in self._places:
            self._places[key] = len(self.kernels)
            self._sources.append(source)
            self.kernels.append({"source": key[0], "entry": key[1], "target": key[2], **(about or {})})
        return self._places[key]
