"""Compiles the shipped kernels for a compute capability and compares what they need with its card's limits."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from autotune.database.model_of_time import table_for
from autotune.portability.kernels import (
    PortableKernel,
    distinct,
    kernels_of_defaults,
    kernels_of_entries,
    sampled,
)
from autotune.search.pruning import why_hopeless
from kernelgen.build.compiler import compile_source
from kernelgen.device import DeviceFacts, representative
from kernelgen.errors import CompileError
from kernelgen.kernels.dispatch import geometry

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
        return tuple(found for found in self.findings if _spills_too_much(found, self.facts))


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


def _spills_too_much(found: Finding, facts: DeviceFacts) -> bool:
    return why_hopeless({"spill_bytes": found.spill_bytes}, found.kernel.tuned, facts) is not None


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
