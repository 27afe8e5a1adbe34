"""The kernels that a user of a GPU gets: for each tuned entry that is shipped, and for each default of the configs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.database.lookup import find_schedule
from autotune.database.store import device_files, load_table, tuned_dirs
from autotune.workload.config import find_problem, load_config
from autotune.workload.kinds.registry import kernel_kind
from autotune.workload.toml_tables import known_configs
from kernelgen.device import DeviceFacts
from kernelgen.errors import UnsupportedError
from kernelgen.kernels.dispatch import AnyPlan, emit
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.product.defaults import small_graph_edges
from kernelgen.kernels.source import Source


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
        problem = find_problem(entry.problem)
        kernel = (problem, entry.operation, entry.direction, entry.dtype, entry.layout, facts)
        name = " ".join((entry.label, *(str(part) for part in entry.identity[1:6])))
        try:
            found = find_schedule(*kernel, entry.graph_class, strict=False, deterministic=entry.deterministic)
            plan = _plan(kernel, entry.deterministic, found.schedule)
        except UnsupportedError:  # this device has no kernels of the kind: modules take torch's operations
            continue
        yield PortableKernel(name, "entry", found.origin, found.reason, plan, emit(plan), entry.resources)


def kernels_of_defaults(facts: DeviceFacts) -> Iterator[PortableKernel]:
    """The default schedules of the shipped configs' workloads, for small graphs and for large ones."""
    workloads = [workload for name in known_configs() for workload in load_config(name, facts.backend).workloads]
    met: set[tuple[Any, ...]] = set()
    for workload in workloads:
        for direction in workload.directions:
            form = (workload.dtype, workload.layout, facts)
            kernel: Any = (workload.problem, workload.operation, direction, *form)
            if (*kernel, workload.deterministic) in met:
                continue
            met.add((*kernel, workload.deterministic))
            kind = kernel_kind(workload.operation)
            spec = _spec(kernel, workload.deterministic)
            name = " ".join((workload.label, *kernel[1:5]))
            for size, num_edges in (("large", None), ("small", small_graph_edges(facts))):
                try:
                    plan = _plan(kernel, workload.deterministic, kind.default(spec, num_edges))
                except UnsupportedError:  # as above
                    continue
                yield PortableKernel(f"{name} {size}", "default", "default", "", plan, emit(plan), {})


def _spec(kernel: Any, deterministic: bool) -> Any:
    problem, operation, direction, dtype, layout, facts = kernel
    return kernel_kind(operation).spec(problem, operation, direction, dtype, layout, facts, deterministic)


def _plan(kernel: Any, deterministic: bool, schedule: Knobs) -> AnyPlan:
    kind = kernel_kind(kernel[1])
    plan: AnyPlan = kind.plan(kind.kernel_spec(_spec(kernel, deterministic), schedule), find_schedule)
    return plan


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
