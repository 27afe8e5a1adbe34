"""Schedules by the size class of a graph: looked up direction by direction, and as a family of operators.

In eager mode a module builds the operator of a class when it meets one. A traced module needs all classes at once, as
data: :meth:`Lookup.family` asks for each of them and builds an operator for each different answer. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from autotune.database.lookup import Finder, Tuning
from autotune.errors import TuningMissError
from autotune.workload.graph_class import GraphClass
from autotune.workload.kinds.base import Problem
from autotune.workload.kinds.registry import CONVOLUTIONS
from kernelgen.compat import is_transforming
from kernelgen.device import DeviceFacts
from kernelgen.kernels.knobs import Knobs
from kernelgen.ops.family import build_family

Kind = TypeVar("Kind")
# An order counts edges in 32 bits. Larger graphs take the schedules of this class.
_MOST_LOG2_EDGES = 31


def class_of_call(operation: str, size: tuple[int, int], receiver: torch.Tensor | None, num_nodes: int) -> GraphClass:
    """The class of a call's graph by its size, and by its skew, for which a GPU is waited for.

    receiver: None without edges between nodes. A graph that cannot be looked at (traced, transformed, captured) or has
    no valid one counts as even.
    """
    even = GraphClass(operation, *size)
    if type(receiver) is not torch.Tensor or receiver.dim() != 1 or not len(receiver) or is_transforming(receiver):
        return even
    if not receiver.is_cpu and (not receiver.is_cuda or torch.cuda.is_current_stream_capturing()):
        return even
    return dataclasses.replace(even, log2_skew=GraphClass.of_graph(operation, receiver, num_nodes).log2_skew)


class Found(NamedTuple):
    """By direction, what a lookup found; and why directions are refused, each with the text of its TuningMissError."""

    tuning: dict[str, Tuning]
    refused: dict[str, str]

    @property
    def schedules(self) -> dict[str, Any]:
        return {direction: found.schedule for direction, found in self.tuning.items()}

    @property
    def shortlists(self) -> dict[str, Any]:
        """What first runs try beside the schedules."""
        return {direction: found.others for direction, found in self.tuning.items() if found.others}


class Lookup:
    """The lookups of a module for one device and dtype, in any number of graph classes.

    kernel: problem, operation, dtype, layout and device, as in ``find_schedule``. given: schedules by direction that
    are not looked up.
    """

    def __init__(
        self,
        kernel: tuple[Problem, str, str, str, DeviceFacts],
        directions: tuple[str, ...],
        given: Mapping[str, Knobs],
        strict: bool | None,
        *,
        deterministic: bool = False,
        tolerance: float | None = None,
    ) -> None:
        problem, operation, dtype, layout, facts = kernel
        self.operation, self._given, self._directions = operation, given, directions

        def finders(strict: bool | None, tolerance: float | None) -> dict[str, Finder]:
            options: dict[str, Any] = {"deterministic": deterministic, "tolerance": tolerance}
            asked = [name for name in directions if name not in given]
            return {name: Finder(problem, operation, name, dtype, layout, facts, strict, **options) for name in asked}

        self._finders, self._lenient = finders(strict, tolerance), finders(False, None)

    def find(self, graph_class: GraphClass | None) -> Found:
        """What would be loaded for a graph class; TuningMissError if forward has no suitable schedule.

        Other directions are refused instead: few of them are called.
        """
        found = Found({}, {})
        for name in self._directions:
            if name in self._given:
                found.tuning[name] = Tuning(self._given[name], "given", None, "given by the caller")
                continue
            try:
                found.tuning[name] = self._finders[name].find(graph_class)
            except TuningMissError as error:
                if name == "forward":
                    raise
                found.refused[name] = str(error)
                found.tuning[name] = dataclasses.replace(self._lenient[name].find(graph_class), reason=str(error))
        return found

    def family(self, build: Callable[[Found], Kind]) -> Kind:
        """The family of the operators for all size classes; classes with the same schedules share one."""
        members: list[Kind] = []
        places: dict[Any, int] = {}
        classes: list[list[int]] = []
        # From large to small, because the first member is for large graphs.
        for log2_edges in reversed(range(_MOST_LOG2_EDGES + 1)):
            row = []
            for log2_degree in range(log2_edges + 1) if self.operation in CONVOLUTIONS else (0,):
                found = self.find(GraphClass(self.operation, log2_edges, log2_degree))
                key = (*found.schedules.values(), *found.shortlists.items(), *found.refused)
                if key not in places:
                    places[key] = len(members)
                    members.append(build(found))
                row.append(places[key])
            classes.append(row)
        return build_family(members, classes[::-1])
