"""One entry of a ``results/DEVICE.json`` file: a tuned schedule and its measurements, validated.

:meth:`Entry.from_dict` reads plain JSON data into a frozen :class:`Entry`, :meth:`Entry.to_dict` writes the same data.
Entries may come from other people's files: every type is checked, schedules are rebuilt from known knobs only, and the
path of the raw trials must be that of a study.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autotune.errors import DatabaseError
from autotune.workload.known_kinds import KINDS, OPERATIONS, kernel_kind, problem_from_key
from autotune.workload.objective import FIGURES, TIME, Objective
from autotune.workload.workload import GraphClass, Identity
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError
from kernelgen.kernels.knobs import Knobs
from kernelgen.kernels.spec import BYTES

CHOICES: dict[str, tuple[str, ...]] = {
    "operation": OPERATIONS,
    "direction": tuple(dict.fromkeys(name for kind in KINDS for name in kind.directions)),
    "dtype": tuple(BYTES),
    "layout": ("mul_ir", "ir_mul"),
}
TIMES = ("time_us", "q1_us", "q3_us")
GAIN = dict.fromkeys(("ratio", "low", "high", "level"), "float")
CERTIFICATE = {"bitwise": "bool", "equivariance": "float", "edges": "int", "environment": "str"}
_TRIALS_FILE = re.compile(r"trials/[^\W_]([^\W_]|-){0,99}/[A-Za-z0-9_.-]{1,200}\.jsonl")
# Omitted from files when empty.
OPTIONAL = ("source", "gain", "certificate", "checked", "runner_up", "conditions", "joules", "memory_bytes", "front")


@dataclass(frozen=True)
class Entry:
    """Times are medians with quartiles in microseconds, ``bytes`` compulsory traffic, ``copy_bandwidth`` in bytes/s.

    problem: its ``key``. graph_class: :attr:`GraphClass.text`. graph: name, edges, nodes.
    schedule: as ``Schedule.to_dict`` writes it. default: schedule and times of the default schedule in the same run.
    peers: times (or ``{"error": text}``) by peer. errors: largest relative error against float64 e3nn by output slot.
    floor_us: ``bytes / copy_bandwidth``. trials: ``file`` (relative), ``count``, ``ok``, settings of the search and
        why it ``ended``.
    deterministic: tuned among kernels whose results are bitwise equal from run to run.
    source: hash of the kernel's source (:mod:`autotune.database.maintenance`); empty in older entries.
    gain: speed-up ``ratio`` over the default with the interval ``low`` to ``high`` at ``level``; empty if the default
        won, and in entries of before 22 November 2026, whichever schedule won there.
    runner_up: if the default won, the same of the fastest other schedule; empty in entries of before 27 November 2026.
    conditions: of the machine meanwhile (:mod:`autotune.measure.timing`); ``noise``: why not to trust the times.
    certificate: ``bitwise`` (two runs gave the same bits), ``equivariance`` (relative error), ``edges`` (number checked
        for errors), ``environment`` (hash of software and driver versions). Empty, or without ``equivariance``, where
        it was not measured: ``equitune db verify`` measures it.
    objective: by what the schedule was chosen (:mod:`autotune.workload.objective`); ``time`` in older entries, and then
        omitted from files. The runtime serves the entry whatever it is. gain and runner_up are ratios of it.
    joules, memory_bytes: of a call, if the objective asks for them, and then also in ``default`` and ``peers``; else 0.
    front: of the objective ``pareto:``, the schedules to which none was better in one figure and as good in the others,
        with their figures, by the names that they had in the comparison.
    checked: result of the last ``equitune db verify``: date, state (ok, drifted, or how it failed), reason, time_us.

    Raises DatabaseError with the field, its value and what was expected.
    """

    label: str
    problem: str
    operation: str
    direction: str
    dtype: str
    layout: str
    graph_class: str
    graph: Mapping[str, Any]
    schedule: Mapping[str, Any]
    time_us: float
    q1_us: float
    q3_us: float
    default: Mapping[str, Any]
    peers: Mapping[str, Mapping[str, Any]]
    errors: Mapping[str, float]
    tolerance: float
    bytes: int
    copy_bandwidth: float
    floor_us: float
    resources: Mapping[str, Any]
    generator: str
    software: Mapping[str, str]
    date: str
    trials: Mapping[str, Any]
    deterministic: bool = False
    source: str = ""
    gain: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    certificate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runner_up: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    objective: str = str(TIME)
    joules: float = 0.0
    memory_bytes: float = 0.0
    front: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # The tuner passes a schedule object, files hold its data: both are accepted.
        if isinstance(self.schedule, Knobs):
            object.__setattr__(self, "schedule", self.schedule.to_dict())
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
            check_json(field.name, getattr(self, field.name))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise DatabaseError(f"entry field {name} is {getattr(self, name)!r}; expected one of {allowed}")
        try:
            _schedule(self.operation, json.dumps(self.schedule, sort_keys=True))
        except (EquituneError, TypeError) as error:
            raise DatabaseError(f"entry field schedule: {error}") from error
        _check_parts("graph", self.graph, {"name": "str", "edges": "int", "nodes": "int"})
        try:
            _graph_class(self.graph_class)
        except (EquituneError, ValueError) as error:
            raise DatabaseError(f"entry field graph_class: {error}") from error
        # The default is not run any more, so it may use a form that later generators dropped.
        for name, measured in {"default": self.default, **_parts("front", self.front)}.items():
            _check_parts(name, measured, {"schedule": "Mapping"} | _figures_in(measured))
        for name, peer in _parts("peers", self.peers).items():
            _check_parts(name, peer, {"error": "str"} if "error" in peer else _figures_in(peer))
        try:
            Objective.parse(self.objective)
        except EquituneError as error:
            raise DatabaseError(f"entry field {error}") from error
        _check_parts("checked", self.checked, dict.fromkeys({"state", "reason", "date"} & self.checked.keys(), "str"))
        _check_parts("trials", self.trials, dict.fromkeys({"count", "ok"} & self.trials.keys(), "int"))
        _check_values("errors", self.errors, dict.fromkeys(self.errors, "float"))
        _check_values("gain", self.gain, GAIN)
        _check_values("runner_up", self.runner_up, GAIN)
        _check_values("resources", self.resources, dict.fromkeys(self.resources, "float"))
        _check_values("certificate", self.certificate, CERTIFICATE)
        # A merge writes there: it must be a study's file, as ``trials.study_path`` names it, and nothing else.
        file = self.trials.get("file", "")
        if file != "" and not (isinstance(file, str) and _TRIALS_FILE.fullmatch(file)):
            raise DatabaseError(
                f"entry field trials['file'] is {file!r:.200}; expected trials/DEVICE/STUDY.jsonl, inside the results "
                "directory"
            )

    @property
    def identity(self) -> Identity:
        """Unique key of an entry in a database."""
        kernel = (self.problem, self.operation, self.direction, self.dtype, self.layout)
        return (*kernel, self.graph_class, self.deterministic)

    def spec(self, facts: DeviceFacts) -> Any:
        """The spec of its kernel on a device, with an empty schedule."""
        kernel = (problem_from_key(self.problem), self.operation, self.direction, self.dtype, self.layout)
        return kernel_kind(self.operation).spec(*kernel, facts, self.deterministic)

    @property
    def tuned_schedule(self) -> Knobs:
        """:attr:`schedule` as the object that the generator takes."""
        return _schedule(self.operation, json.dumps(self.schedule, sort_keys=True))

    @property
    def parsed_graph_class(self) -> GraphClass:
        return _graph_class(self.graph_class)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """The entry that ``to_dict`` wrote; DatabaseError for a missing or unknown field or a wrong type.

        A field with a default may be missing, as in older files.
        """
        if not isinstance(data, Mapping):
            raise DatabaseError(f"an entry is {type(data).__name__}; expected an object")
        fields = dataclasses.fields(cls)
        names = [field.name for field in fields]
        needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        missing = [name for name in needed if name not in data]
        unknown = [name for name in data if name not in names]
        if missing or unknown:
            raise DatabaseError(f"entry fields missing: {missing or 'none'}; unknown: {unknown or 'none'}")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, fields in the order of the class, empty optional fields omitted."""
        data = {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if self.objective == str(TIME):
            del data["objective"]
        return {name: value for name, value in data.items() if value or name not in OPTIONAL}

    @property
    def by(self) -> str:
        """What a text adds to its gain or its verdict: `` by energy``; empty for time."""
        return Objective.parse(self.objective).by

    @property
    def worst_error(self) -> float:
        """The largest known relative error, against float64 and under a rotation."""
        return max([*self.errors.values(), self.certificate.get("equivariance", 0.0)], default=math.inf)

    @property
    def wrong_record(self) -> str:
        """Which recorded error or certificate is above the tolerance, in words; empty if none is."""
        return what_is_wrong(self.errors, self.tolerance, self.certificate) or ""

    @property
    def failed_check(self) -> str:
        """Why the schedule must not be loaded, from its last check; empty if it may."""
        state = self.checked.get("state", "ok")
        return "" if state in ("ok", "drifted") else f"{state}: {self.checked.get('reason', '')}"


def what_is_wrong(
    errors: Mapping[str, float], tolerance: float, certificate: Mapping[str, Any] = MappingProxyType({})
) -> str | None:
    """Which error against float64, or under a rotation, is above the tolerance, in words; None if none is.

    A NaN never passes.
    """
    wrong = {slot: error for slot, error in errors.items() if not error <= tolerance}
    if wrong:
        shown = ", ".join(f"{slot} {error:.1e}" for slot, error in wrong.items())
        return f"relative error against float64 e3nn above {tolerance:g}: {shown}"
    turned = certificate.get("equivariance", 0.0)
    return None if turned <= tolerance else f"relative error under a rotation above {tolerance:g}: {turned:.1e}"


@functools.lru_cache(maxsize=4096)
def _schedule(operation: str, text: str) -> Knobs:
    # By text: as keys, 1, 1.0 and True are the same.
    return kernel_kind(operation).read(json.loads(text))


@functools.lru_cache(maxsize=1024)
def _graph_class(text: str) -> GraphClass:
    return GraphClass.parse(text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _check_type(name: str, value: Any, kind: str) -> None:
    if kind.startswith("Mapping"):
        good = isinstance(value, Mapping)
    elif kind == "float":
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool)
    else:
        good = isinstance(value, bool if kind == "bool" else str)
    if not good:
        words = {"float": "a finite number", "int": "an integer", "str": "text", "bool": "true or false"}
        wanted = words.get(kind, "an object")
        raise DatabaseError(f"entry field {name} is {value!r}; expected {wanted}")


def _parts(name: str, data: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The objects of a field by their names in messages, such as ``peers['e3nn']``."""
    parts = {f"{name}[{key!r}]": part for key, part in data.items()}
    for where, part in parts.items():
        _check_type(where, part, "Mapping")
    return parts


def _figures_in(measured: Mapping[str, Any]) -> dict[str, str]:
    """The types of an object's figures: it has times, and of the others what was measured."""
    return dict.fromkeys((*TIMES, *(key for key in FIGURES.values() if key in measured)), "float")


def _check_parts(name: str, data: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for key, kind in kinds.items():
        _check_type(f"{name}[{key!r}]", data.get(key), kind)


def _check_values(name: str, data: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for key, value in data.items():
        if key not in kinds:
            raise DatabaseError(f"entry field {name} has the key {key!r}; expected some of {tuple(kinds)}")
        _check_type(f"{name}[{key!r}]", value, kinds[key])


def check_json(name: str, value: Any) -> None:
    """Raise unless strict JSON can hold the nested data: otherwise the file could not be read back."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DatabaseError(f"field {name} has the key {key!r}; expected text")
            check_json(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(f"{name}[{index}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise DatabaseError(f"entry field {name} is {value!r}; expected a finite number")
    elif not (value is None or isinstance(value, str | int | float)):
        raise DatabaseError(f"entry field {name} is {type(value).__name__} {value!r}; expected JSON data")


def is_alike(spec: Any, graph_class: GraphClass | None, entry: Entry) -> bool:
    """Whether an entry applies to a graph: for a GPU's convolutions, if both graphs are small or both are large.

    On an H200 schedules tuned on graphs of 2^16 to 2^19 edges took 1.5 to 2.2 times as long as the default on 306 edges
    (124 pairs), and 0.80 to 1.13 times as long on graphs of that range. Convolutions have a separate default for small
    graphs; other operations have one for all sizes.
    """
    if graph_class is None or spec.facts.backend != "cuda" or spec.operation != "conv":
        return True
    facts = spec.facts
    return graph_class.is_small(facts) == entry.parsed_graph_class.is_small(facts)
