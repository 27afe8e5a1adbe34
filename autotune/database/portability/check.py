"""Compiles the shipped kernels for a compute capability and compares what they need with its card's limits."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from autotune.database.portability.kernels import (
    PortableKernel,
    distinct,
    kernels_of_defaults,
    kernels_of_entries,
    sampled,
)
from autotune.search.pruning import spill_limit
from kernelgen.compile.compiler import compile_source
from kernelgen.device import DeviceFacts, representative
from kernelgen.emit.kernel_source import geometry
from kernelgen.errors import CompileError

# Registers are allocated by 256 to a warp: CUDA C++ programming guide, hardware multithreading.
REGISTERS_TOGETHER = 256
WARP = 32
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
    """The findings for one card. entries: of the databases. unchanged, changed: how many of those are served as tuned,
    and in a legal form or by a default. texts: distinct ones, of which ``findings`` has those compiled. seconds: wall
    clock of all, cpu_seconds: of this process.
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
    def spilling(self) -> tuple[Finding, ...]:
        """Kernels that spill more than a search would measure: legal, but slow."""
        return tuple(found for found in self.findings if found.spill_bytes > spill_limit(self.facts))


def check_arch(
    arch: str, sample: int | None = None, on_finding: Callable[[Finding], None] = lambda finding: None
) -> Report:
    """Compile what a user of such a GPU would get, and check it against the limits of ``device.representative(arch)``.

    sample: compile at most this many, evenly over operations, directions and dtypes. Raises UnsupportedError for an
    unknown architecture, ToolMissingError without NVRTC.
    """
    facts, begin, cpu = representative(arch), time.monotonic(), time.process_time()
    entries, defaults = list(kernels_of_entries(facts)), list(kernels_of_defaults(facts))
    kernels = distinct(iter(entries + defaults))
    chosen = kernels if sample is None else sampled(kernels, sample)
    # Long texts first, so that no processor waits at the end. NVRTC releases the interpreter's lock.
    chosen.sort(key=lambda kernel: -len(kernel.source.text))
    findings = []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for finding in pool.map(lambda kernel: examine(kernel, facts), chosen):
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
    a_warp = -(-finding.registers * WARP // REGISTERS_TOGETHER) * REGISTERS_TOGETHER
    registers = a_warp * -(-threads // WARP)
    if not finding.registers:
        yield "the compiler reports no registers"
    if registers > facts.registers_per_unit:
        yield f"{threads} threads need {registers} registers; a multiprocessor has {facts.registers_per_unit}"
    if finding.shared_bytes > facts.shared_per_block:
        yield f"{finding.shared_bytes} bytes of shared memory; a block has {facts.shared_per_block}"
    if threads > facts.max_threads_per_unit:
        yield f"{threads} threads; a multiprocessor holds {facts.max_threads_per_unit}"
