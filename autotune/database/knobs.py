"""The knobs of a product's kernel on a device: the values that each may take, and the nearest legal form of a
schedule.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from autotune.database.entry import Entry
from autotune.database.nearest import Query, why_illegal
from kernelgen.device import DeviceFacts
from kernelgen.errors import ScheduleError
from kernelgen.kernels.knobs import Knobs, power_of_two_at_most
from kernelgen.kernels.pairs.plan import pair_paths
from kernelgen.kernels.product.plan import bytes_ahead, small_graph_edges
from kernelgen.kernels.product.schedule import HostSchedule
from kernelgen.kernels.radial.plan import RadialSchedule
from kernelgen.kernels.spec import BYTES, Spec
from kernelgen.problem.product import TensorProductProblem

# The values that each knob of a product may take, for one kernel on one device.

# Group counts tried one by one beyond one per input block: the best count is rarely a round number.
FINE_GROUPS = 3
# Edges of a run, besides, where a run's end costs more: it cuts a row.
LONGER_RUNS = (64, 128)
# Choices for every CUDA kernel.
BLOCKS: dict[str, tuple] = {"block_size": (32, 64, 128, 256, 512), "min_blocks": (0, 1, 2, 3, 4, 6, 8)}


def product_knobs(spec: Spec, num_edges: int | None, skewed: bool = False) -> dict[str, tuple]:
    """Choices for a channelwise product; they include the values of ``spec``'s schedule.

    skewed: a GPU would wait for the graph's longest node, so that workers take long runs of edges.
    """
    problem, facts, conv = spec.problem, spec.facts, spec.operation == "conv"
    knobs: dict[str, tuple] = {}
    owners = ("owners",) if _has_owners(spec, num_edges) else ()
    if conv:
        knobs["accumulate"] = ("registers", "atomics", *owners)
        knobs["order"] = ("receiver", "sender")
    elif owners:
        knobs["accumulate"] = ("registers", *owners)
    # Every count up to slightly more than one per input block, then doubling up to one per path.
    least, most = len(_multiplicities(problem)), max(1, len(problem.paths))
    blocks = max(least, len({path.in1 for path in problem.paths}))
    doubled = itertools.takewhile(lambda count: count < most, (blocks * 2**power for power in range(16)))
    few = range(least, min(most, blocks + FINE_GROUPS) + 1)
    knobs["path_groups"] = tuple(sorted({least, most, *few, *doubled}))
    knobs["edges_per_chunk"] = (8, 32, 128) if facts.backend == "cpu" else (1, 2, 8, 16, 32)
    small, cuda = _is_small(facts, num_edges), facts.backend == "cuda"
    knobs |= _cuda_knobs(problem, small) if cuda else _host_knobs(spec)
    if cuda and conv:
        if not problem.shared_weights:
            knobs["prefetch"] = (*knobs["prefetch"], "ring2", "ring4")
        knobs["teams_per_node"] = (1, 2, 4, 8)
        knobs["finish"] = ("blocks", "unrolled")
        if not spec.deterministic:
            knobs["runs"] = ("fixed", "waves")
            knobs["edges_per_chunk"] += LONGER_RUNS if skewed else ()
    if cuda and conv and spec.layout == "mul_ir" and set("xg") & set(spec.direction.live_outputs):
        knobs["writes"] = ("lanes", "rows")
    if skewed and _stores_rows(spec):
        knobs["zeros"] = ("apart", "cut")
    elif _waits_for_zeros(spec, num_edges):
        knobs["zeros"] = ("apart", "inside")
    for knob, choices in knobs.items():
        value = getattr(spec.schedule, knob)
        knobs[knob] = choices if value in choices else (*choices, value)
    return knobs


def pair_knobs(spec: Spec) -> dict[str, tuple]:
    """Choices for an edge-by-edge kernel of pairs: teams per edge, warp and multiprocessor, or threads on a CPU."""
    if spec.facts.backend == "cpu":
        return {"threads": threads_of(spec.facts)}
    knobs: dict[str, tuple] = {**BLOCKS, "edges_per_warp": (1, 2, 4, 8)}
    if not spec.deterministic:
        knobs["path_groups"] = tuple(n for n in (1, 2, 4, 8) if n <= max(1, len(pair_paths(spec.problem))))
    return knobs


def _is_small(facts: DeviceFacts, num_edges: int | None) -> bool:
    return num_edges is not None and num_edges <= small_graph_edges(facts)


def _has_owners(spec: Spec, num_edges: int | None) -> bool:
    """Whether to try ``accumulate="owners"``: for plain gradients of y, and edge gradients on small graphs."""
    live = spec.direction.live_outputs
    if spec.facts.backend != "cuda" or "g" in live:
        return False
    if spec.operation == "plain":
        return "y" in live and not spec.deterministic  # a deterministic kernel has one writer anyway
    return live != "x" and _is_small(spec.facts, num_edges)


def _waits_for_zeros(spec: Spec, num_edges: int | None) -> bool:
    """Whether a separate launch that writes zeros may matter: gradients on small graphs, y of a plain product."""
    if spec.deterministic or spec.facts.backend != "cuda" or spec.facts.is_hip:
        return False
    live = spec.direction.live_outputs
    return "g" not in live and ("y" in live if spec.operation == "plain" else _is_small(spec.facts, num_edges))


def _stores_rows(spec: Spec) -> bool:
    """Whether runs of edges by receiver may store rows of values: a forward convolution on a GPU of CUDA."""
    fits = spec.operation == "conv" and spec.facts.backend == "cuda" and not spec.facts.is_hip
    return fits and spec.direction.outputs == "g" and not spec.deterministic


def threads_of(facts: DeviceFacts) -> tuple[int, ...]:
    """All cores (0) or half of them."""
    return (0, facts.units // 2) if facts.units >= 4 else (0,)


def _multiplicities(problem: TensorProductProblem) -> list[int]:
    return sorted({path.mul for path in problem.paths}) or [1]


def _host_knobs(spec: Spec) -> dict[str, tuple]:
    """Channel blocks of half a machine vector to four, none wider than the channels; threads."""
    lanes = spec.facts.vector_bytes // BYTES[spec.dtype]
    widest = max(4, 2 * power_of_two_at_most(_multiplicities(spec.problem)[-1]) - 1)
    blocks = [size for size in HostSchedule.choices["channel_block"] if lanes // 2 <= size <= min(widest, 4 * lanes)]
    return {"channel_block": tuple(blocks) or (4,), "threads": threads_of(spec.facts)}


def _cuda_knobs(problem: TensorProductProblem, small: bool) -> dict[str, tuple]:
    """Teams of a quarter of the fewest channels to twice the most; channels per lane that divide every multiplicity.

    A small team with four channels per lane reads a quarter of the edge values from shared memory. With one channel per
    lane those reads take four times as long as the arithmetic on them (128 bytes per cycle and multiprocessor).
    """
    fewest, most = _multiplicities(problem)[0], _multiplicities(problem)[-1]
    teams = tuple(edges for edges in (1, 2, 4) if min(8, fewest / 4) <= 32 // edges < 2 * most)
    return {
        "edges_per_warp": teams or (8,),
        "channels_per_thread": tuple(c for c in (1, 2, 4) if all(mul % c == 0 for mul in _multiplicities(problem))),
        "warps_per_edge": (1, 2, 4),
        "edge_operand": ("inline", "shared", "basis"),
        "stage_edges": (4, 8, 16, 32),
        "prefetch": ("none", "reload", "copy"),
        "ahead": ("none", "weights", "rows", *(("all", "along") if small else ())),
        "stream": (False, True),
        **BLOCKS,
    }


# A schedule tuned on another GPU in a form for this one: less shared memory, fewer threads at once, a smaller L2.

Step = Callable[[Knobs], Knobs | None]
BLACKWELL = 100
# Most steps from a schedule to its legal form.
MOST_STEPS = 5


def legal_form(schedule: Knobs, is_legal: Callable[[Knobs], bool]) -> Knobs | None:
    """The schedule itself if it is legal, else the legal one that is the fewest steps away; None if there is none.

    A step gives one knob its next lower value, in this order of preference: fewer blocks that must fit at once; blocks
    of half the threads, twice as many of which must fit (what a team does stays as it is); fewer edges fetched at a
    time; fewer edges ahead; fewer teams a node; no rows prefetched to L2; zeros by a
    launch of their own. Products of four warps, which one architecture has, become those of each warp first.
    """
    if is_legal(schedule):
        return schedule
    steps = [step for step in _STEPS if step(schedule) is not None]
    for count in range(1, MOST_STEPS + 1):
        for chosen in itertools.combinations_with_replacement(steps, count):
            form: Knobs | None = schedule
            for step in chosen:
                form = None if form is None else step(form)
            if form is not None and is_legal(form):
                return form
    return None


def _lower(schedule: Knobs, knob: str) -> Knobs | None:
    """With the knob's next lower value above 0; None if there is none."""
    values = [value for value in schedule.choices.get(knob, ()) if 0 < value < getattr(schedule, knob)]
    return dataclasses.replace(schedule, **{knob: max(values)}) if values else None


def _half_the_block(schedule: Knobs) -> Knobs | None:
    form, doubled = _lower(schedule, "block_size"), 2 * getattr(schedule, "min_blocks", 0)
    if form is None or doubled not in form.choices["min_blocks"] or doubled <= 2:
        return form
    return dataclasses.replace(form, **{"min_blocks": doubled})


def _other(schedule: Knobs, knob: str, of: tuple[str, ...], by: str) -> Knobs | None:
    """With another value of a knob that has one of these; None if it has not."""
    return dataclasses.replace(schedule, **{knob: by}) if getattr(schedule, knob, by) in of else None


def _by_single_warps(schedule: Knobs) -> Knobs | None:
    if isinstance(schedule, RadialSchedule) and schedule.products == "wgmma":
        return schedule.by_single_warps()
    return None


_STEPS: tuple[Step, ...] = (
    _by_single_warps,
    functools.partial(_lower, knob="min_blocks"),
    _half_the_block,
    functools.partial(_lower, knob="stage_edges"),
    functools.partial(_other, knob="prefetch", of=("ring4",), by="ring2"),
    functools.partial(_lower, knob="stages"),
    functools.partial(_lower, knob="teams_per_node"),
    functools.partial(_other, knob="ahead", of=("weights", "rows"), by="none"),
    functools.partial(_other, knob="zeros", of=("inside", "cut"), by="apart"),
)


def within_limits(query: Query, entry: Entry, there: DeviceFacts) -> tuple[Entry, str]:
    """An entry of another device with a schedule that suits this one, and what was changed, in words.

    It is legal here, and what it prefetches fits into L2 if it did ``there``, where it was tuned. The entry itself
    where that holds, or for no form of it.
    """
    fitted_there = _fits_l2(query, entry.tuned_schedule, there)

    def suits(schedule: Knobs) -> bool:
        if query.once(("legal", schedule), lambda: why_illegal(query, schedule)):
            return False
        return not fitted_there or _fits_l2(query, schedule, query.spec.facts)

    found = legal_form(_with_registers(entry, there, query.spec.facts), suits)
    if found is None or found == entry.tuned_schedule:
        return entry, ""
    before, after = entry.tuned_schedule.to_dict(), found.to_dict()
    changed = ", ".join(f"{name}={value}" for name, value in after.items() if value != before.get(name))
    return dataclasses.replace(entry, schedule=after), f", with {changed} for this device's limits"


def _with_registers(entry: Entry, there: DeviceFacts, here: DeviceFacts) -> Knobs:
    """The schedule, without the limit of registers (``min_blocks``) if it bound before Blackwell and this is Blackwell.

    From compute capability 10.0 NVRTC 13.5 pairs floats and takes up to 1.4 times as many registers for the same text:
    kernels that spilled 0 and 36 bytes at their limit for sm_90 spill 1,808 and 2,828 there, and none without a limit.
    """
    schedule = entry.tuned_schedule
    limited = getattr(schedule, "block_size", 0) * getattr(schedule, "min_blocks", 0)
    if not (limited and _capability(there) < BLACKWELL <= _capability(here)):
        return schedule
    limit = there.registers_per_unit // limited // 8 * 8
    return (
        dataclasses.replace(schedule, **{"min_blocks": 0}) if entry.resources.get("registers", 0) >= limit else schedule
    )


def _capability(facts: DeviceFacts) -> int:
    number = facts.arch.removeprefix("sm_")
    return int(number) if number.isdecimal() else 0


def _fits_l2(query: Query, schedule: Knobs, facts: DeviceFacts) -> bool:
    if getattr(schedule, "ahead", "") not in ("weights", "rows"):
        return True
    try:
        spec = query.kind.kernel_spec(dataclasses.replace(query.spec, facts=facts), schedule)
        return bytes_ahead(query.kind.plan(spec, query.find_schedule)) <= facts.l2_bytes
    except ScheduleError:
        return False  # not legal there
