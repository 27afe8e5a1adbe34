"""What the model of time knows of a kernel: numbers of its schedule, direction and graph, and of its plan's work.

Sizes are logarithms to base 2. A problem's own sizes (paths, channels, rows) are none of them: a tree that asks for
those learns ten problems by heart. Numbers of the plan say what they mean for a schedule.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune import paths
from autotune.database.nearest import device_distance
from autotune.database.store import DatabaseWarning
from autotune.workload.known_kinds import kernel_kind
from autotune.workload.workload import GraphClass
from kernelgen.arithmetic.couplings import path_terms
from kernelgen.device import DeviceFacts
from kernelgen.errors import EquituneError, cause_of
from kernelgen.files import parse_json
from kernelgen.kernels.product.channelwise import Plan, group_paths, registers_of
from kernelgen.kernels.product.plan import MAX_REGISTERS, OwnersPlan
from kernelgen.kernels.product.schedule import CudaSchedule, schedule_from_dict
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import TensorProductProblem

# The model of time: a sum of oblivious decision trees, as arrays.
#
# All nodes of one level of an oblivious tree ask the same question, so a tree of depth d is d features, d thresholds
# and 2^d values, and a prediction is d comparisons and one look-up a tree (Prokhorenkova et al., CatBoost, NeurIPS
# 2018).

# Values of leaves are kept as whole multiples of this.
STEP = 1e-5


@dataclass(frozen=True, eq=False)
class Trees:
    """features, thresholds: [trees, depth]; values: [trees, 2^depth], in steps of :data:`STEP`.

    The sum of all trees' values is the natural logarithm of a schedule's time over the least of its study. It is the
    mean of ``models`` models, each with as many consecutive trees, that were fitted with different seeds.
    """

    features: np.ndarray
    thresholds: np.ndarray
    values: np.ndarray
    base: int
    models: int = 1

    def predict(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """Logarithms of the slowdown of schedules. rows: their features, [schedules, features]."""
        return (self.base + self._leaves(rows).sum(1)) * STEP

    def cautious(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        """As :meth:`predict`, plus the standard deviation of the models: what they disagree about is a risk."""
        leaves = self._leaves(rows)
        each = leaves.reshape(len(leaves), self.models, -1).sum(2) * self.models
        return (self.base + leaves.sum(1) + each.std(1)) * STEP

    def _leaves(self, rows: Sequence[Sequence[float]] | np.ndarray) -> np.ndarray:
        given = np.asarray(rows, dtype=float)
        bits = given[:, self.features] > self.thresholds
        leaves = np.left_shift(bits, np.arange(self.features.shape[1])).sum(2)
        return self.values[np.arange(len(self.values)), leaves]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; :meth:`from_dict` reads it back."""
        arrays = {name: getattr(self, name).tolist() for name in ("features", "thresholds", "values")}
        return {"base": self.base, "models": self.models, **arrays}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trees:
        features, values = (np.array(data[name], dtype=np.int64) for name in ("features", "values"))
        thresholds = np.array(data["thresholds"], dtype=float)
        if features.shape != thresholds.shape or values.shape != (len(features), 1 << features.shape[1]):
            raise ValueError(f"trees of shapes {features.shape}, {thresholds.shape} and {values.shape}")
        models = int(data["models"])
        if models < 1 or len(features) % models:
            raise ValueError(f"{len(features)} trees of {models} models")
        return cls(features, thresholds, values, int(data["base"]), models)

    @classmethod
    def mean(cls, models: Sequence[Trees]) -> Trees:
        """One model that predicts the mean of several of the same depth and number of trees."""
        values = np.concatenate([np.rint(model.values / len(models)).astype(np.int64) for model in models])
        features = np.concatenate([model.features for model in models])
        thresholds = np.concatenate([model.thresholds for model in models])
        return cls(features, thresholds, values, round(sum(model.base for model in models) / len(models)), len(models))


# The file of a fitted model: ``results/predicted/DEVICE.json``, shipped with the package.
#
# ``equitune replay defaults`` writes it, with the record of its cross-validation in ``results/replay``.

FORM = 3


@dataclass(frozen=True, eq=False)
class Winner:
    """A schedule that won a search, with the layout and the size of graph that it won on."""

    schedule: CudaSchedule
    layout: str
    small: bool


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """device: as in a database. winners: by ``operation direction``. classes: recorded graph classes, by operation.

    expected: by ``operation size`` (``conv small``) the time over the tuned time in the cross-validation; ``tried`` is
    the mean of choices among a problem's own trials, which are all measured; ``first_mean`` and ``first_worst`` are of
    what a first run keeps. transfer: by architecture, what schedules are estimated to cost there, over the fastest
    trial that is legal there (``replay.defaults.transfer``).
    """

    device: Mapping[str, Any]
    trials: int
    problems: int
    trees: Trees
    winners: Mapping[str, tuple[Winner, ...]]
    classes: Mapping[str, tuple[GraphClass, ...]]
    expected: Mapping[str, Mapping[str, float]]
    transfer: Mapping[str, Mapping[str, float]]


def table_path(results: Path, slug: str) -> Path:
    """The file of the model that was fitted to a device's trials."""
    return results / "predicted" / f"{slug}.json"


def table_from(data: Mapping[str, Any]) -> PredictionTable:
    """The table written as JSON; ValueError, KeyError, TypeError or EquituneError if it is none of this version."""
    if data["form"] != FORM or tuple(data["names"]) != FEATURES:
        raise ValueError(
            f"form {data['form']!r} with {len(data['names'])} features; expected form {FORM} with {FEATURES}"
        )
    winners = {
        kernel: tuple(Winner(schedule_of(line["schedule"]), str(line["layout"]), bool(line["small"])) for line in lines)
        for kernel, lines in dict(data["winners"]).items()
    }
    classes = {operation: tuple(map(GraphClass.parse, texts)) for operation, texts in dict(data["classes"]).items()}
    expected = {group: dict(found) for group, found in dict(data["expected"]).items()}
    transfer = {arch: dict(found) for arch, found in dict(data["transfer"]).items()}
    trees = Trees.from_dict(data["trees"])
    return PredictionTable(
        data["device"], data["trials"], data["problems"], trees, winners, classes, expected, transfer
    )


def knobs_of(schedule: CudaSchedule) -> dict[str, Any]:
    """What files keep of a schedule: the knobs that differ from the default of their field."""
    plain = CudaSchedule().to_dict()
    return {name: value for name, value in schedule.to_dict().items() if value != plain.get(name)}


def schedule_of(knobs: Mapping[str, Any]) -> CudaSchedule:
    """The schedule of :func:`knobs_of`; ScheduleError for an unknown knob, ValueError for another backend."""
    schedule = schedule_from_dict({"backend": "cuda", **knobs})
    if not isinstance(schedule, CudaSchedule):
        raise ValueError(f"a schedule's backend is {schedule.backend!r}; expected 'cuda'")
    return schedule


def table_for(facts: DeviceFacts) -> PredictionTable | None:
    """The shipped table fitted on this device, or else on the nearest of its backend; None without one."""
    return _nearest(paths.results_dir() / "predicted", facts)


@functools.lru_cache(maxsize=16)
def _nearest(folder: Path, facts: DeviceFacts) -> PredictionTable | None:
    tables = [table for path in sorted(folder.glob("*.json")) if (table := _read(path)) is not None]
    alike = [table for table in tables if table.device.get("backend") == facts.backend]
    return min(
        alike,
        key=lambda table: (table.device.get("slug") != facts.slug, device_distance(table.device, facts)),
        default=None,
    )


@functools.lru_cache(maxsize=16)
def _read(path: Path) -> PredictionTable | None:
    try:
        return table_from(parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, EquituneError) as error:
        warnings.warn(f"{path} is ignored, defaults come from rules: {cause_of(error)}", DatabaseWarning, stacklevel=2)
        return None


# What a kernel's plan says of its work: memory traffic, atomic additions, registers, occupancy, waves, code.
#
# All are relative to the problem or to the device, so that a model learns them on other problems than it is asked
# about.

WORK_NAMES = (
    *("registers", "pressure", "spilled", "blocks_held", "warps_held", "warps_busy", "waves", "tail"),
    *("traffic", "edge_bytes", "added", "added_bytes", "near_rows"),
    *("values_per_path", "values_per_product", "in_flight"),
    *("sums", "weights_held", "useful_lanes", "products", "largest_share", "largest_group", "largest_paths"),
    *("intensity", "code_held", "code_of_group", "groups_held"),
)
# What the compiler took over the estimate, with spilled ones, mean of the logarithms of 12,176 kernels on an H200.
RELOADED, OTHERS = 1.34, 1.15
# Shared memory that each block reserves, and most blocks of a multiprocessor: CUDA C++ programming guide, table of
# technical specifications per compute capability.
RESERVED_BYTES, MOST_BLOCKS = 1024, 32
# Beyond so many waves the last one does not matter.
MANY_WAVES = 20


@dataclass(frozen=True)
class GroupSizes:
    """A path group in numbers. x, g: elements of its rows. products: with a coefficient each, of one channel."""

    x: int
    g: int
    mul: int
    paths: int
    values: int
    products: int


@functools.lru_cache(maxsize=1024)
def group_sizes(problem: TensorProductProblem, count: int) -> tuple[GroupSizes, ...]:
    """Of every group of a partition into ``count`` groups."""
    terms = path_terms(problem)
    return tuple(
        GroupSizes(
            sum(problem.in1[block].dim for block in group.in1),
            sum(problem.out[block].dim for block in group.out),
            group.mul,
            len(group.paths),
            sum(len(terms[path].values) for path in group.paths),
            sum(len(terms[path].entries) for path in group.paths),
        )
        for group in group_paths(problem, count)
    )


@dataclass(frozen=True)
class Occupancy:
    """registers: that a thread needs. limit: that it can have. blocks: that a multiprocessor holds at once."""

    registers: float
    limit: int
    blocks: int

    @classmethod
    def of(cls, plan: Plan, shared_bytes: int) -> Occupancy:
        schedule, facts = plan.spec.cuda, plan.spec.facts
        needed = registers_of(plan) * (RELOADED if schedule.prefetch in ("reload", "ring2", "ring4") else OTHERS)
        threads = schedule.block_size * max(1, schedule.min_blocks)
        limit = min(MAX_REGISTERS, facts.registers_per_unit // threads)
        used = min(max(32, 8 * math.ceil(needed / 8)), limit if schedule.min_blocks else MAX_REGISTERS)
        blocks = min(facts.max_threads_per_unit, facts.registers_per_unit // used) // schedule.block_size
        if shared_bytes:
            blocks = min(blocks, facts.shared_per_unit // (shared_bytes + RESERVED_BYTES))
        return cls(needed, limit, max(1, min(MOST_BLOCKS, blocks)))


@dataclass(frozen=True)
class Traffic:
    """Elements an edge, by the plan and at least. near: of rows that a worker keeps for its run."""

    moved: float
    added: float
    near: float
    least: float

    @classmethod
    def of(cls, plan: Plan, groups: Sequence[GroupSizes], share: float) -> Traffic:
        """share: rows of the near side an edge, as one worker takes several edges of a node."""
        problem, direction = plan.spec.problem, plan.spec.direction
        live, read = direction.live_outputs, _reads(plan)
        in_rows, out_rows = sum(group.x * group.mul for group in groups), sum(group.g * group.mul for group in groups)
        of_in, of_out = (share if plan.near == side else 1.0 for side in ("in1", "out"))
        own_weights = 0 if problem.shared_weights else problem.weight_numel * read["w"]
        moved = float(own_weights) + problem.dim_in2 * plan.units * read["y"] + problem.weight_numel * ("w" in live)
        moved += in_rows * of_in * read["x"] + out_rows * of_out * read["g"]
        added = float(in_rows) * of_in * ("x" in live and plan.node_sums != "x")
        added += out_rows * of_out * ("g" in live and plan.node_sums != "g")
        added += problem.dim_in2 * plan.units * ("y" in live)
        least = float(problem.weight_numel) * (read["w"] + ("w" in live)) + problem.dim_in2
        least += problem.dim_in1 * (of_in * read["x"] + ("x" in live)) + problem.dim_out * of_out * read["g"]
        return cls(moved, added, share * (in_rows if plan.near == "in1" else out_rows), least)


def _reads(plan: Plan) -> dict[str, int]:
    """How many arrays of each slot the kernel reads: an input and its tangent."""
    operands = plan.spec.direction.operands
    return {slot: (slot in operands) + (f"t{slot}" in operands) for slot in "xywg"}


def log2(number: float) -> float:
    """At least of a thousandth."""
    return math.log2(max(number, 1e-3))


def work_of(plan: Plan | OwnersPlan, edges: float, nodes: float) -> list[float]:
    """The numbers of :data:`NAMES`; of a plan of two kernels, of the one for edges. nodes: that own edges."""
    shared_bytes, main = plan.shared_bytes, plan.others if isinstance(plan, OwnersPlan) else plan
    schedule, facts = main.spec.cuda, main.spec.facts
    conv = main.spec.operation == "conv"
    owned = schedule.accumulate == "registers" and conv
    runs = nodes * schedule.teams_per_node if owned else edges / schedule.edges_per_chunk
    a_node = edges / nodes if conv else 1.0
    share = 1.0 / max(1.0, min(edges / max(1.0, runs), a_node))
    groups = group_sizes(main.spec.problem, len(main.groups))
    held, traffic = Occupancy.of(main, shared_bytes), Traffic.of(main, groups, share)
    size = BYTES[main.spec.dtype]
    blocks = max(1.0, runs * main.units * schedule.lanes / schedule.block_size)
    waves, warps = blocks / (facts.units * held.blocks), held.blocks * schedule.block_size / 32
    busy = min(warps, runs * main.units / schedule.edges_per_warp / facts.units)
    flight = warps * schedule.lanes * size * traffic.moved / max(1, main.units)
    return [
        *(log2(held.registers / MAX_REGISTERS), log2(held.registers / held.limit)),
        *(max(0.0, held.registers - held.limit) / 64, log2(held.blocks), log2(warps), log2(busy)),
        *(log2(waves), 1.0 if main.fills_waves else (math.ceil(waves) / waves if waves < MANY_WAVES else 1.0)),
        *(log2(traffic.moved / traffic.least), log2(traffic.moved * size), log2(1 + traffic.added / traffic.least)),
        *(log2(traffic.added * size), log2(1 + traffic.near / traffic.least)),
        *_arithmetic(main, groups, traffic, log2(flight / 1024)),
        *_code(main, groups, held, blocks / facts.units),
    ]


def _arithmetic(plan: Plan, groups: Sequence[GroupSizes], traffic: Traffic, flight: float) -> list[float]:
    """From ``values_per_path`` to ``intensity``."""
    schedule, live, read = plan.spec.cuda, plan.spec.direction.live_outputs, _reads(plan)
    size, paths = BYTES[plan.spec.dtype], len(plan.spec.problem.paths)
    tiles = [-(-group.mul // plan.tile) for group in groups]
    values = sum(group.values * tile for group, tile in zip(groups, tiles, strict=True))
    products = sum(group.products * tile for group, tile in zip(groups, tiles, strict=True))
    a_lane = schedule.channels_per_thread * products
    read_values = values * read["y"] if schedule.edge_operand != "inline" else 8.0 * a_lane
    results = len(live) + 2 * len(plan.spec.direction.tangents)
    of_x, of_g = "x" in live or plan.near == "in1", "g" in live or plan.near == "out"
    words, widest = schedule.channels_per_thread * size // 4, max(group.products for group in groups)
    most_paths = max(group.paths for group in groups)
    return [
        *(log2(values / paths), log2(read_values / max(1, a_lane)), flight),
        log2(max(group.x * of_x + group.g * of_g for group in groups) * words),
        log2(most_paths * read["w"] * words),
        sum(group.mul for group in groups) / (plan.units * plan.tile),
        *(log2(a_lane), log2(widest * schedule.channels_per_thread * plan.units / max(1, a_lane))),
        *(log2(widest * schedule.channels_per_thread), most_paths / paths),
        log2(a_lane * schedule.lanes * results / (traffic.least * size)),
    ]


def _code(plan: Plan, groups: Sequence[GroupSizes], held: Occupancy, blocks_each: float) -> list[float]:
    """Code that a multiprocessor executes at a time, as products: blocks side by side have other path groups.

    A multiprocessor's caches hold 128 kB of code. Backward of nequip-benzene (68 paths) takes 1.6 times as long with
    two blocks of four warps than with one block of eight, at the same registers and warps, where all do one group.
    """
    schedule, direction = plan.spec.cuda, plan.spec.direction
    results = len(direction.live_outputs) + 2 * len(direction.tangents)
    a_product = schedule.channels_per_thread * (BYTES[plan.spec.dtype] // 4) * results
    code = [group.products * a_product for group in groups]
    number_of = [number for number, group in enumerate(groups) for _ in range(-(-group.mul // plan.tile))]
    shares = [
        set(number_of[start : start + schedule.warps_per_edge])
        for start in range(0, plan.units, schedule.warps_per_edge)
    ]
    a_block = sum(sum(code[number] for number in share) for share in shares) / len(shares)
    held_groups = held.blocks * sum(map(len, shares)) / len(shares)
    at_once = min(sum(code), min(held.blocks, max(1.0, blocks_each)) * a_block)
    return [log2(at_once), log2(sum(code) / len(code)), log2(min(len(groups), held_groups))]


# Values of each named knob after the first, which all the others' zeros say.
NAMED = {
    "accumulate": ("atomics", "owners"),
    "order": ("sender",),
    "edge_operand": ("shared", "basis"),
    "prefetch": ("reload", "copy", "ring2", "ring4"),
    "ahead": ("weights", "rows", "all", "along"),
    "finish": ("unrolled",),
    "zeros": ("inside",),
    "writes": ("rows",),
}
COUNTED = (
    *("edges_per_chunk", "edges_per_warp", "channels_per_thread", "warps_per_edge", "teams_per_node"),
    *("stage_edges", "block_size"),
)
FEATURES = (
    *(f"{knob}={value}" for knob, values in NAMED.items() for value in values),
    *COUNTED,
    *("path_groups", "groups_per_block", "paths_per_group", "stream", "min_blocks"),
    *("units", "teams_per_warp_slot", "edges_per_team", "teams_per_block", "fill_fewest", "fill_most"),
    *("edges", "degree", "convolution", "float64", "mul_ir", "deterministic"),
    *("live_x", "live_y", "live_w", "live_g", "tangents", "value_too", "bytes_per_edge"),
    *WORK_NAMES,
)
WARP_SLOTS = 64


class Features:
    """The features of one kernel's schedules, in the order of :data:`NAMES`; what they share is computed once."""

    def __init__(self, spec: Spec, graph_class: GraphClass) -> None:
        problem, direction, conv = spec.problem, spec.direction, spec.operation == "conv"
        self._conv, self._paths, self._blocks = conv, len(problem.paths), len(problem.in1)
        self._muls = [path.mul for path in problem.paths]
        self._edges = 2.0**graph_class.log2_edges
        degree = 2.0**graph_class.log2_degree if conv else 1.0
        self._nodes = max(1.0, self._edges / degree)
        self._slots = spec.facts.units * WARP_SLOTS
        size = (int(self._edges), int(self._nodes))
        moved = kernel_kind(spec.operation).compulsory_bytes(spec, direction.name, *size)
        flags = (conv, spec.dtype == "float64", spec.layout == "mul_ir", spec.deterministic)
        self._shared = (
            *(log2(self._edges), log2(degree)),
            *map(float, flags),
            *(float(slot in direction.live_outputs) for slot in "xywg"),
            *(float(len(direction.tangents)), float("g" in direction.tangents), log2(moved / self._edges)),
        )

    def of(self, plan: Plan | OwnersPlan) -> list[float]:
        """The features of one schedule, by its plan."""
        schedule = plan.spec.cuda
        groups, tile = schedule.path_groups, schedule.lanes * schedule.channels_per_thread
        owned = schedule.accumulate == "registers" and self._conv
        runs = self._nodes * schedule.teams_per_node if owned else self._edges / schedule.edges_per_chunk
        units = groups / self._paths * sum(-(-mul // tile) for mul in self._muls)
        values = (
            *(float(getattr(schedule, knob) == value) for knob, values in NAMED.items() for value in values),
            *(log2(getattr(schedule, knob)) for knob in COUNTED),
            *(float(groups), groups / self._blocks, self._paths / groups),
            *(float(schedule.stream), float(schedule.min_blocks)),
            *(log2(units), log2(runs * units / schedule.edges_per_warp / self._slots)),
            *(log2(self._edges / max(1.0, runs)), log2(schedule.block_size // schedule.lanes)),
            *(log2(min(self._muls) / tile), log2(max(self._muls) / tile)),
        )
        # Rounded, so that thresholds between two values separate them on every machine.
        return [round(value, 4) for value in (*values, *self._shared, *work_of(plan, self._edges, self._nodes))]
