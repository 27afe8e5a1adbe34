"""What a pack will have: operators with their calls, and the sources of kernels, in the order in which they are met."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kernelgen.compile.compiler import compile_by
from kernelgen.compile.host import portable_job
from kernelgen.compile.job import Job
from kernelgen.compile.nvrtc import cuda_job, ptx_job
from kernelgen.compile.pack_file import PTX, source_digest
from kernelgen.device import DeviceFacts, assumed
from kernelgen.emit.kernel_source import emit, launch_rule
from kernelgen.emit.source import Source
from kernelgen.errors import InputError, PackError
from kernelgen.ops.registry import resolve
from kernelgen.packs.calls import Call, Launch, launches, needs
from kernelgen.packs.fixed import edge_sources, node_sources
from kernelgen.plan.planner import AnyPlan
from kernelgen.runtime import index_check
from kernelgen.runtime.kernel import host_threads


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
        members = getattr(operator, "members", None)
        if members is None:
            self._add_to(operator, call)
            return
        places = [self._add_to(member, Call(call.op, member.text, call.tangents, call.outputs)) for member in members]
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
        jobs = {kernel["target"]: self._job(kernel["target"], level) for kernel in self.kernels}
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = [
                pool.submit(compile_by, jobs[kernel["target"]], source)
                for kernel, source in zip(self.kernels, self._sources, strict=True)
            ]
            binaries = [future.result() for future in made]
        for facts, binary in zip(self.kernels, binaries, strict=True):
            facts |= {"resources": binary.resources, "compiler": jobs[facts["target"]].identity}
        return [binary.path.read_bytes() for binary in binaries]

    def _job(self, target: str, level: str) -> Job:
        if target == "cpu":
            return portable_job(level)
        return ptx_job(self.gpus[-1].arch) if target == PTX else cuda_job(target)

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
            return {f"{index} {target}": self._of_plan(plans[index], target) for index in plans for target in targets}

        return launch.facts | {"kernels": places(launch.plans), "permuted": places(launch.permuted)}

    def _of_plan(self, plan: AnyPlan, target: str) -> int:
        spec = plan.spec
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
        return self.kernel(emit(plan), target, about)
