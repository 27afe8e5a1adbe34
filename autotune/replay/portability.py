"""Compiles the shipped kernels for a compute capability and compares what they need with its card's limits."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from autotune.database.lookup import Finder, plan_for
from autotune.database.model_of_time import table_for
from autotune.database.store import device_files, load_table, tuned_dirs
from autotune.search.loop import why_hopeless
from autotune.workload.config import load_config
from autotune.workload.toml_tables import known_configs
from kernelgen.compile.compiler import compile_source
from kernelgen.device import DeviceFacts, representative
from kernelgen.errors import CompileError, UnsupportedError
from kernelgen.kernels.dispatch import AnyPlan, emit, geometry
from kernelgen.kernels.product.plan import small_graph_edges
from kernelgen.kernels.source import Source

# Registers of a lane are allocated by eights: CUDA C++ programming guide, hardware multithreading, and AMD's guides.
REGISTERS_TOGETHER = 8
# Geometry of a launch on a graph of this many edges and nodes: only the number of blocks depends on it.
EDGES, NODES = 65536, 4096


@dataclass(frozen=True)
class Finding:
    """What one kernel needs; ``fault``: why it cannot run on the card, empty if it can. spill_bytes: a thread's."""

    kernel: PortableKernel
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    fault: str = ""


@dataclass(frozen=True)
class Report:
    """The findings for one card. entries: of the databases; changed: those served in another form than tuned.
    defaults: kernels of default schedules. texts: distinct ones of all these, of which ``findings`` has those compiled.
    seconds: wall clock; cpu_seconds: of this process.
    """

    facts: DeviceFacts
    entries: int
    changed: int
    defaults: int
    texts: int
    findings: tuple[Finding, ...]
    seconds: float
    cpu_seconds: float

    @property
    def faults(self) -> tuple[Finding, ...]:
        return tuple(found for found in self.findings if found.fault)

    @property
    def summary(self) -> str:
        """One line for people."""
        facts = self.facts
        registers = sorted(found.registers for found in self.findings if found.registers) or [0]
        spills = [found.spill_bytes for found in self.findings if found.spill_bytes] or [0]
        return (
            f"{facts.arch} ({facts.name}): {self.entries} entries, {self.changed} of them in another form, "
            f"{self.defaults} defaults; {self.texts} texts, {len(self.findings)} compiled, {len(self.faults)} failed; "
            f"registers {registers[0]} to {registers[-1]}, median {registers[len(registers) // 2]}; "
            f"{sum(map(bool, spills))} spill, at most {max(spills)} bytes, {len(self.spilling)} of them more than a "
            f"search would measure; {self.seconds / 60:.1f} minutes"
        )

    @property
    def spilling(self) -> tuple[Finding, ...]:
        """Kernels that a search would not measure here, given what they spilled where they were tuned: slow, not wrong.

        Of an untuned default the compiler's first report is all there is, so it counts against the limit alone.
        """
        return tuple(
            found
            for found in self.findings
            if why_hopeless({"spill_bytes": found.spill_bytes}, found.kernel.tuned, self.facts) is not None
        )


def check_arch(
    arch: str,
    sample: int | None = None,
    with_defaults: bool = True,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    limit_s: float = math.inf,
) -> Report:
    """Compile what a user of such a GPU would get, and check it against the limits of ``device.representative(arch)``.

    sample: compile at most this many, evenly over operations, directions and dtypes. limit_s: seconds after which no
    other is begun; they too come evenly, short ones first. Raises UnsupportedError for an unknown architecture,
    ToolMissingError without NVRTC.
    """
    facts, begin, cpu = representative(arch), time.monotonic(), time.process_time()
    entries = list(kernels_of_entries(facts))
    defaults = list(kernels_of_defaults(facts)) if with_defaults else []
    kernels = distinct(entries + defaults)
    chosen = sampled(kernels, len(kernels) if sample is None else sample)
    if limit_s == math.inf:
        # Long texts first, so that no processor waits at the end.
        chosen.sort(key=lambda kernel: -len(kernel.source.text))

    def finding_of(kernel: PortableKernel) -> Finding | None:
        return examine(kernel, facts) if time.monotonic() < begin + limit_s else None

    findings = []
    # NVRTC releases the interpreter's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for finding in filter(None, pool.map(finding_of, chosen)):
            on_finding(finding)
            findings.append(finding)
    return Report(
        facts,
        len(entries),
        sum(kernel.is_changed for kernel in entries),
        len(defaults),
        len(kernels),
        tuple(findings),
        time.monotonic() - begin,
        time.process_time() - cpu,
    )


def expected_transfer(facts: DeviceFacts) -> str:
    """What schedules of the nearest tuned device are estimated to cost on a card, in words; empty where unknown."""
    table = table_for(facts)
    known = table.transfer.get(facts.arch) if table else None
    if table is None or known is None:
        return ""
    return (
        f"estimate, not measured: by this card's limits alone, tuned entries of {table.device['name']} take "
        f"{known['tuned']:.2f} times the fastest trial that is legal here (worst {known['tuned worst']:.2f}), "
        f"untuned choices {known['untuned']:.2f} (worst {known['untuned worst']:.2f})"
    )


def examine(kernel: PortableKernel, facts: DeviceFacts) -> Finding:
    """Compile one kernel and compare it with the limits of a card."""
    try:
        needs = compile_source(kernel.source, facts).resources
    except CompileError as error:
        return Finding(kernel, fault=f"does not compile: {error}")
    _, threads, dynamic = geometry(kernel.plan, EDGES, NODES, NODES)
    shared = dynamic + needs["shared_bytes"]
    finding = Finding(kernel, needs["registers"], needs["spill_bytes"], shared)
    return dataclasses.replace(finding, fault="; ".join(_faults(finding, threads, facts)))


def _faults(finding: Finding, threads: int, facts: DeviceFacts) -> Iterator[str]:
    a_lane = -(-finding.registers // REGISTERS_TOGETHER) * REGISTERS_TOGETHER
    registers = a_lane * facts.wave * -(-threads // facts.wave)
    if not finding.registers:
        yield "the compiler reports no registers"
    if registers > facts.registers_per_unit:
        yield f"{threads} threads need {registers} registers; a multiprocessor has {facts.registers_per_unit}"
    if finding.shared_bytes > facts.shared_per_block:
        yield f"{finding.shared_bytes} bytes of shared memory; a block has {facts.shared_per_block}"
    if threads > facts.max_threads_per_unit:
        yield f"{threads} threads; a multiprocessor holds {facts.max_threads_per_unit}"


@dataclass(frozen=True)
class PortableKernel:
    """A kernel for a device. name: for people. origin: that of its schedule, see ``lookup.Tuning``.

    kind: ``entry``, or ``default`` of a config's problem. reason: where the schedule comes from, and what was changed.
    tuned: what the compiler reported of the entry where it was tuned; empty for a default.
    """

    name: str
    kind: str
    origin: str
    reason: str
    plan: AnyPlan
    source: Source
    tuned: Mapping[str, Any]

    @property
    def is_changed(self) -> bool:
        """Whether the tuned schedule does not suit this device's limits, so that another one is served."""
        return "for this device's limits" in self.reason or (self.kind, self.origin) == ("entry", "default")


def kernels_of_entries(facts: DeviceFacts) -> Iterator[PortableKernel]:
    """Of every CUDA entry in the databases: what lookup gives for its problem and graph on this device."""
    files = [path for folder in tuned_dirs() for path in device_files(folder)]
    tables = [table for table in map(load_table, files) if table.device.get("backend") == "cuda"]
    entries = {identity: entry for table in tables for identity, entry in table.by_identity.items()}
    for entry in entries.values():
        name = " ".join((entry.label, *(str(part) for part in entry.identity[1:6])))
        try:
            spec = entry.spec(facts)
            found = Finder(spec, strict=False).find(entry.graph_class)
            plan = plan_for(spec, found.schedule)
        except UnsupportedError:  # this device has no kernels of the kind: modules take torch's operations
            continue
        yield PortableKernel(name, "entry", found.origin, found.reason, plan, emit(plan), entry.resources)


def kernels_of_defaults(facts: DeviceFacts) -> Iterator[PortableKernel]:
    """The default schedules of the shipped configs' workloads, for small graphs and for large ones."""
    workloads = [workload for name in known_configs() for workload in load_config(name, facts.backend).workloads]
    met: set[Any] = set()
    for workload in workloads:
        for direction in workload.directions:
            spec = workload.spec(direction, facts)
            if (spec, direction) in met:
                continue
            met.add((spec, direction))
            name = " ".join((workload.label, workload.operation, direction, workload.dtype, workload.layout))
            for size, num_edges in (("large", None), ("small", small_graph_edges(facts))):
                try:
                    plan = plan_for(spec, workload.kind.default(spec, num_edges))
                except UnsupportedError:  # as above
                    continue
                yield PortableKernel(f"{name} {size}", "default", "default", "", plan, emit(plan), {})


def distinct(kernels: Iterable[PortableKernel]) -> list[PortableKernel]:
    """The first kernel of each text, in order: one text is compiled once, whatever it is called for."""
    found: dict[str, PortableKernel] = {}
    for kernel in kernels:
        found.setdefault(kernel.source.text, kernel)
    return list(found.values())


def sampled(kernels: list[PortableKernel], count: int) -> list[PortableKernel]:
    """At most ``count`` of them, in turn from each operation, direction and dtype, served as tuned or changed.

    Shorter texts come first, since those of the largest problems take the compiler minutes.
    """
    strata: dict[tuple[str, ...], list[PortableKernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: len(kernel.source.text)):
        words = kernel.name.split()
        strata.setdefault((kernel.kind, str(kernel.is_changed), *words[1:4]), []).append(kernel)
    places = [(place, kernel) for found in strata.values() for place, kernel in enumerate(found)]
    places.sort(key=lambda item: (item[0], len(item[1].source.text)))
    return [kernel for _, kernel in places[:count]]
