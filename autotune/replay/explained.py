"""The fewest schedules that are near the best everywhere, as rules that a person can read.

In: the trials of a device's studies. Out: for each operation and direction :class:`Rules`, by greedy set cover: the
schedule that is near the best of most studies, then the one that is near the best of most others, and so on. The model
of time (:mod:`autotune.database.predicted`) chooses among more, and each time for one kernel.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.errors import ConfigError
from autotune.replay.open_formats import StudyFile
from autotune.text import counted
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass

NEAR = 0.05
# What follows from a problem's number of paths rather than from a rule: rules say its range.
FREE = ("path_groups",)


@dataclass(frozen=True)
class Tried:
    """The fully timed trials of a study's last generator: least time over the best, and free knobs, by the other knobs.

    Only these are compared: another generator's kernels may have other times.
    """

    study: StudyFile
    slowdowns: Mapping[str, float]
    free: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    """knobs: of the schedule. free: least and most of each free knob. studies: those that no rule before it covers."""

    knobs: Mapping[str, Any]
    free: Mapping[str, tuple[Any, Any]]
    studies: tuple[StudyFile, ...]
    worst: float

    @property
    def where(self) -> str:
        """What the studies have in common: ``float32, ir_mul, 2^15 to 2^19 edges: mace-mp-large and 3 others``."""
        facts = [study.facts for study in self.studies]
        sets = (" or ".join(sorted({fact[name] for fact in facts})) for name in ("dtype", "layout"))
        sizes = sorted(GraphClass.parse(fact["graph_class"]).log2_edges for fact in facts)
        size = f"2^{sizes[0]}" + (f" to 2^{sizes[-1]}" if sizes[-1] > sizes[0] else "")
        first, *others = sorted({fact["label"] for fact in facts})
        names = first if not others else f"{first} and {counted(len(others), 'other')}"
        rows = kernel_kind(facts[0]["operation"]).rows[0]
        return f"{', '.join(sets)}, {size} {rows}: {names}"


@dataclass(frozen=True)
class Rules:
    """The rules of one operation and direction, the one that covers most first; ``tried``: all its studies."""

    operation: str
    direction: str
    near: float
    rules: tuple[Rule, ...]
    tried: tuple[Tried, ...]

    @property
    def shared(self) -> dict[str, Any]:
        """The knobs on which all rules agree."""
        first, *others = (rule.knobs for rule in self.rules)
        absent = object()
        return {
            name: value for name, value in first.items() if all(knobs.get(name, absent) == value for knobs in others)
        }

    def beyond(self, most: int) -> tuple[list[float], int]:
        """Of studies that the first ``most`` rules do not cover: their least slowdowns where tried; how many others."""
        keys = [_key(rule.knobs) for rule in self.rules[:most]]
        slowdowns = [
            min((tried.slowdowns.get(key, math.inf) for key in keys), default=math.inf) for tried in self.tried
        ]
        outside = [slowdown for slowdown in slowdowns if slowdown > 1 + self.near]
        known = [slowdown for slowdown in outside if not math.isinf(slowdown)]
        return known, len(outside) - len(known)


def explain(studies: Iterable[StudyFile], near: float = NEAR) -> list[Rules]:
    """The rules of each operation and direction; a study without a full time does not count."""
    if not 0 <= near < 1:
        raise ConfigError(f"--near is {near:g}; expected a fraction from 0 to below 1, such as 0.05")
    groups: dict[tuple[str, str], list[Tried]] = {}
    for study in studies:
        if tried := _tried(study):
            groups.setdefault((study.facts["operation"], study.facts["direction"]), []).append(tried)
    return [Rules(*kernel, near, tuple(_cover(some, near)), tuple(some)) for kernel, some in sorted(groups.items())]


def _tried(study: StudyFile) -> Tried | None:
    timed = [line for line in study.lines if line["state"] == "ok" and not line.get("cut")]
    timed = [line for line in timed if line.get("generator") == timed[-1].get("generator")]
    best = min((line["time_us"] for line in timed), default=math.nan)
    slowdowns, free = dict[str, float](), dict[str, Mapping[str, Any]]()
    for line in sorted(timed, key=lambda line: line["time_us"], reverse=True):  # of a key the fastest stays
        knobs = study.configuration(line)
        key = _key({name: value for name, value in knobs.items() if name not in (*FREE, "backend")})
        slowdowns[key] = line["time_us"] / best
        free[key] = {name: knobs[name] for name in FREE if name in knobs}
    return Tried(study, slowdowns, free) if timed else None


def _key(knobs: Mapping[str, Any]) -> str:
    return json.dumps(knobs, sort_keys=True)


def _cover(some: Sequence[Tried], near: float) -> Iterator[Rule]:
    """Greedy; of schedules that cover as many, the one with the least mean slowdown over all studies that tried it."""
    left, known = list(some), dict[str, list[float]]()
    for tried in some:
        for key, slowdown in tried.slowdowns.items():
            known.setdefault(key, []).append(slowdown)
    mean = {key: sum(slowdowns) / len(slowdowns) for key, slowdowns in known.items()}
    while left:
        by_key: dict[str, list[Tried]] = {}
        for tried in left:
            for key, slowdown in tried.slowdowns.items():
                if slowdown <= 1 + near:
                    by_key.setdefault(key, []).append(tried)
        key = min(by_key, key=lambda key: (-len(by_key[key]), mean[key], key))
        covered = by_key[key]
        values = {name: sorted(tried.free[key][name] for tried in covered) for name in covered[0].free[key]}
        free = {name: (found[0], found[-1]) for name, found in values.items()}
        worst = max(tried.slowdowns[key] for tried in covered)
        yield Rule(json.loads(key), free, tuple(tried.study for tried in covered), worst)
        left = [tried for tried in left if tried not in covered]


def lines_of(found: Rules, most: int) -> Iterator[str]:
    """The first rules in words."""
    total, shown = len(found.tried), found.rules[:most]
    covered = sum(len(rule.studies) for rule in shown)
    yield (
        f"{found.operation} {found.direction}: {counted(total, 'kernel')}, "
        f"{counted(len(found.rules), 'schedule')} within {found.near:.0%} of the best of each"
    )
    shared = found.shared if len(shown) > 1 else {}
    if shared:
        yield f"  all: {_words(shared)}"
    for number, rule in enumerate(shown, 1):
        own = {name: value for name, value in rule.knobs.items() if name not in shared}
        ranges = {name: low if low == high else f"{low} to {high}" for name, (low, high) in rule.free.items()}
        yield f"  {number}. {counted(len(rule.studies), 'kernel')}, at worst {rule.worst:.3f}: {rule.where}"
        yield f"     {_words(own | ranges)}"
    if covered < total:
        known, untried = found.beyond(most)
        worst = f"at worst {max(known):.2f} times the best where one was tried" if known else ""
        never = f"{untried} never tried one" if untried else ""
        yield f"  the others, {total - covered} of {total}: {', '.join(text for text in (worst, never) if text)}"


def _words(knobs: Mapping[str, Any]) -> str:
    texts = {True: "yes", False: "no"}
    return ", ".join(f"{name} {texts[value] if isinstance(value, bool) else value}" for name, value in knobs.items())


def as_data(found: Rules) -> dict[str, Any]:
    """Plain data of all rules."""
    rules = [
        {
            "schedule": dict(rule.knobs),
            "free": {name: list(ends) for name, ends in rule.free.items()},
            "worst": rule.worst,
            "where": rule.where,
            "studies": [study.name for study in rule.studies],
        }
        for rule in found.rules
    ]
    return {"operation": found.operation, "direction": found.direction, "near": found.near, "rules": rules}
