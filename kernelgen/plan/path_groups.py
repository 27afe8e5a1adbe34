"""Partitions the paths of a problem into groups, each with its own accumulators."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from kernelgen.errors import ScheduleError
from kernelgen.problem.tensor_product import TensorProductProblem


@dataclass(frozen=True)
class Group:
    """Paths of equal multiplicity that one worker computes together."""

    paths: tuple[int, ...]
    in1: tuple[int, ...]
    out: tuple[int, ...]
    mul: int


def _accumulators(problem: TensorProductProblem, paths: tuple[int, ...]) -> int:
    return sum(problem.out[out].dim for out in {problem.paths[p].out for p in paths})


def _split(problem: TensorProductProblem, paths: tuple[int, ...]) -> list[tuple[int, ...]]:
    half: list[int] = []
    total, size = _accumulators(problem, paths), 0
    for path in paths[:-1]:
        if half and size >= total / 2:
            break
        half.append(path)
        size += problem.out[problem.paths[path].out].dim
    return [tuple(half), paths[len(half) :]]


@functools.lru_cache(maxsize=1024)
def group_paths(problem: TensorProductProblem, count: int) -> tuple[Group, ...]:
    """Partition the paths into ``count`` groups; paths of one input block stay together if possible.

    Raises ScheduleError unless ``count`` lies between the number of distinct multiplicities and the number of paths.
    """
    by_block = itertools.groupby(sorted(problem.paths, key=lambda p: (p.in1, p.index)), key=lambda p: p.in1)
    parts = [tuple(path.index for path in paths) for _, paths in by_block]
    least = len({path.mul for path in problem.paths})
    if not least <= count <= max(1, len(problem.paths)):
        raise ScheduleError(
            f"path_groups={count}: this problem allows {least} (one a multiplicity) "
            f"to {len(problem.paths)} (one a path)"
        )

    def mul(paths: tuple[int, ...]) -> int:
        return problem.paths[paths[0]].mul

    while len(parts) > count:
        pairs = [(a, b) for a, b in itertools.combinations(parts, 2) if mul(a) == mul(b)]
        first, second = min(pairs, key=lambda pair: sum(_accumulators(problem, part) for part in pair))
        parts[parts.index(first)] = first + second
        parts.remove(second)
    while len(parts) < count:
        largest = max((part for part in parts if len(part) > 1), key=lambda part: _accumulators(problem, part))
        position = parts.index(largest)
        parts[position : position + 1] = _split(problem, largest)
    return tuple(
        Group(
            part,
            tuple(dict.fromkeys(problem.paths[p].in1 for p in part)),
            tuple(dict.fromkeys(problem.paths[p].out for p in part)),
            mul(part),
        )
        for part in parts
    )
