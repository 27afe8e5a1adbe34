"""The first screen of a device's page, and what tells how it was measured and how devices compare."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from autotune.report.charts import COLOURS
from autotune.report.devices import PASSES, DeviceData, DeviceRows
from autotune.report.kernels import rows_text
from autotune.report.markup import (
    Bar,
    Cell,
    Choice,
    Column,
    Content,
    Markup,
    definitions,
    folded,
    join,
    picker,
    table,
    tag,
)
from autotune.report.rows import ModelRow, SuiteRow, compared_with, mapping, mean_ratio
from autotune.text import (
    CAPTURED,
    DEFAULT,
    JOINT,
    MISSING,
    STOCK,
    TUNED,
    binary_text,
    bytes_text,
    contender_name,
    count,
    direction_name,
    entry_note,
    error_text,
    floored_ratio,
    geometric_mean,
    kind_text,
    ratio_text,
    significant,
    time_text,
)
from autotune.workload.config import load_all, load_graphs

# The first screen: the sentence and the picker, of models if a record of them exists, else of kernels.

MODEL_ROWS, KERNEL_ROWS = "model-rows", "kernel-rows"


def first_screen(data: DeviceData) -> Markup:
    """The whole of it."""
    device = str(data.device["name"])
    if not data.models:
        return join((_lead(kernels_sentence(kernel_rows(data), device)), kernel_picker(data)))
    drawn = picker(MODEL_ROWS, MODEL_AXES, model_choices(data.models), "peak memory", first_model_row(data.models))
    note = tag("p", RANDOM, class_="hint") if any(row.random for row in data.models) else None
    joint = joint_sentence(data.models)
    return join((_lead(models_sentence(data.models, device)), drawn, tag("p", joint, class_="hint") if joint else None,
                 note))  # fmt: skip


def kernel_picker(data: DeviceData) -> Markup | None:
    """Kernels to pick from; None without any."""
    rows = kernel_rows(data)
    if not rows:
        return None
    chosen = kernel_choices(rows, str(data.device.get("backend") or "cpu"))
    return picker(KERNEL_ROWS, KERNEL_AXES, chosen, "extra memory", first_kernel_row(rows))


def _lead(text: str) -> Markup:
    return tag("p", text, class_="lead")


# Rows of whole models to pick from, and the sentence about all of them.

PACKAGES = {"mace": "MACE", "nequip": "NequIP", "sevennet": "SevenNet", "allegro": "Allegro"}
MODEL_AXES = ("Model", "Structure", "Pass", "Precision")
# Neither Equitune alone nor a competitor; the sentence below the bars says which parts are whose.
JOINT_ROLE = "both together"
RANDOM = "The models have their published hyperparameters and random weights: times do not depend on weights, predictions do."  # noqa: E501


def model_choices(rows: Sequence[ModelRow]) -> list[Choice]:
    return [_model_choice(row) for row in rows]


def first_model_row(rows: Sequence[ModelRow]) -> int:
    """The place of the row to show first: energies and forces in float32, with all bars, nearest to the mean."""
    mean = mean_ratio(rows)

    def rank(row: ModelRow) -> tuple[Any, ...]:
        untimed = sum(math.isnan(row.time_us(name)) for name in (TUNED, row.best_other, STOCK, DEFAULT))
        off = math.inf if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        return (untimed, row.text("pass") != "energy_forces", row.text("dtype") != "float32", off)

    return min(range(len(rows)), key=lambda place: rank(rows[place]))


def _model_choice(row: ModelRow) -> Choice:
    other = row.best_other
    ours = "tuned" if row.tuned else "not tuned on this device"
    roles = {TUNED: ours, CAPTURED: "captured: one launch a step", JOINT: JOINT_ROLE, STOCK: "stock"}
    roles[DEFAULT] = "untuned default"
    captured = CAPTURED if row.time_us(CAPTURED) > 0 else None  # it has no training step
    names = [name for name in (TUNED, captured, JOINT, other, STOCK, DEFAULT) if name and name in row.contenders]
    bars = tuple(_model_bar(row, name, roles.get(name, "fastest other path")) for name in names)
    command = row.text("command")
    keys = (row.text("model"), row.text("structure"), row.which, row.text("dtype"))
    return Choice(keys, bars, tuple(_model_facts(row)), commands(command) if command else None)


def _model_bar(row: ModelRow, name: str, role: str) -> Bar:
    time_us, memory = row.time_us(name), row.memory(name)
    package = PACKAGES.get(row.text("package"), row.text("package"))
    shown = "Equitune" if name in (TUNED, CAPTURED, DEFAULT) else package if name == STOCK else contender_name(name)
    reason = row.reason(name) if math.isnan(time_us) else ""
    held = "" if math.isnan(memory) else binary_text(memory)
    return Bar(role, shown, ink(name), time_us, held, reason, ours=name == CAPTURED)


def _path(row: ModelRow, name: str) -> str:
    return f"stock {PACKAGES.get(row.text('package'), 'code')}" if name == STOCK else contender_name(name)


def ink(name: str) -> str:
    """Stock has e3nn's colour, and a path that joins two has the first one's."""
    return "e3nn" if name == STOCK else COLOURS.get(name.partition("+")[0], "other")


def _model_facts(row: ModelRow) -> list[str]:
    facts = [f"{count(row.atoms)} atoms, {count(row.edges)} edges"]
    if row.per_atom_us(TUNED) > 0:
        facts.append(f"{significant(row.per_atom_us(TUNED))}\N{NO-BREAK SPACE}µs an atom")
    if row.device_us(TUNED) > 0:
        launches = f" in {count(row.launches(TUNED))} launches" if row.launches(TUNED) > 0 else ""
        facts.append(f"the device works {time_text(row.device_us(TUNED))} of it{launches}")
    if row.fastest and row.time_us(CAPTURED) > 0:
        over = floored_ratio(row.time_us(row.fastest) / row.time_us(CAPTURED))
        facts.append(f"captured, a step is {over} as fast as {_path(row, row.fastest)}")
    found = row.errors(TUNED)
    if found:
        name = max(found, key=lambda key: math.inf if math.isnan(found[key]) else found[key])
        facts.append(f"largest relative error {error_text(found[name])} ({name}) against stock in float64")
    if row.fastest == STOCK and row.best_other is None:
        facts.append("no path but stock was timed beside it")
    elif row.fastest is None:
        facts.append("no other path was timed")
    return facts


def models_sentence(rows: Sequence[ModelRow], device: str) -> str:
    """What Equitune gained on all rows, in one sentence."""
    judged = [row for row in rows if not math.isnan(row.ratio)]
    if not judged:
        return f"No model has been timed with Equitune and without it on this {device} yet."
    mean, least = mean_ratio(judged), min(row.ratio for row in judged)
    memory = geometric_mean(row.memory_ratio for row in judged)
    held = "" if math.isnan(memory) else f", with {ratio_text(memory)} the memory"
    told = f"On this {device}, Equitune runs {_many(judged)} {floored_ratio(mean)} as fast as {compared_with(judged)} on the mean, least {floored_ratio(least)}{held}."  # noqa: E501
    untuned = "" if any(row.tuned for row in judged) else "Nothing was tuned on it."
    return " ".join(filter(None, (told, untuned)))


def joint_sentence(rows: Sequence[ModelRow]) -> str:
    """Of the rows that ran by Equitune and cuEquivariance together; empty without any."""
    joint = [row for row in rows if row.time_us(JOINT) > 0 and row.fastest]
    if not joint:
        return ""
    ratios = [row.time_us(row.fastest) / row.time_us(JOINT) for row in joint]
    mean, least = geometric_mean(ratios), min(ratios)
    return f"Equitune's convolution and cuEquivariance's other parts together run {_many(joint)} {floored_ratio(mean)} as fast as the fastest path without Equitune, least {floored_ratio(least)}."  # noqa: E501


def _many(rows: Sequence[ModelRow]) -> str:
    cases = len({(row.text("model"), row.text("structure")) for row in rows})
    return f"{cases} model{'s' if cases > 1 else ''}" if _structures(rows) == 1 else f"{cases} models × structures"


def _structures(rows: Sequence[ModelRow]) -> int:
    return len({row.text("structure") for row in rows})


# Rows of kernels to pick from, and the sentence about all of them.

KERNEL_AXES = ("Problem", "Graph", "Pass", "Form")
STOCK_KERNELS = "e3nn"
# Of rows equally near to the mean, what most readers run comes first.
USUAL = ("force_step", "forward+backward", "forward")


def kernel_rows(data: DeviceData) -> list[SuiteRow]:
    """The bench rows, then the tuned entries that were compared with a peer and of which the bench has no row."""
    benched = {(row.kernel, row.deterministic) for row in data.suite}
    entries = [SuiteRow(_as_row(entry)) for entry in data.entries]
    rows = [*data.suite, *(row for row in entries if row.peer and (row.kernel, row.deterministic) not in benched)]
    chosen = rows or entries  # tuned without peers: the default alone is there to compare with

    def order(row: SuiteRow) -> tuple[Any, ...]:
        place = PASSES.index(row.which) if row.which in PASSES else len(PASSES)
        return (row.text("label"), _zero(row.edges), row.graph, place, _form(row))

    return sorted((row for row in chosen if row.times), key=order)


def _as_row(entry: dict[str, Any]) -> dict[str, Any]:
    times = {TUNED: entry, DEFAULT: entry.get("default"), **mapping(entry.get("peers"))}
    errors = {TUNED: {str(entry.get("direction")): mapping(entry.get("errors"))}}
    times = {name: found for name, found in times.items() if isinstance(found, dict)}
    return entry | {"pass": entry.get("direction"), "times": times, "errors": errors}


def _zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def kernel_choices(rows: Sequence[SuiteRow], backend: str) -> list[Choice]:
    known = shipped()
    return [_kernel_choice(row, backend, known) for row in rows]


def first_kernel_row(rows: Sequence[SuiteRow]) -> int:
    """The place of the row to show first: of the usual kind, and nearest to the mean speed-up."""
    mean = geometric_mean(row.ratio for row in rows)
    judged = [row for row in rows if not math.isnan(row.ratio)] or list(rows)

    def rank(row: SuiteRow) -> tuple[Any, ...]:
        usual = (row.text("operation") == "conv", row.text("dtype") == "float32", not row.deterministic)
        bars = sum(name in row.times for name in (STOCK_KERNELS, DEFAULT))
        which = USUAL.index(row.which) if row.which in USUAL else len(USUAL)
        off = 0.0 if math.isnan(row.ratio) else abs(math.log(row.ratio / mean))
        return (*(not part for part in usual), -bars, which, off)

    return min(range(len(rows)), key=lambda place: (rows[place] not in judged, *rank(rows[place])))


def _form(row: SuiteRow) -> str:
    operation = row.text("operation") or "conv"
    kind = kind_text(None if operation == "conv" else operation, row.deterministic)
    return ", ".join(filter(None, (kind or "convolution", row.text("dtype"), row.text("layout"))))


def _kernel_choice(row: SuiteRow, backend: str, known: Shipped) -> Choice:
    peers = [row.peer] if row.peer and row.peer != STOCK_KERNELS else []
    stock = [STOCK_KERNELS] if STOCK_KERNELS in row.times else []
    roles = {TUNED: "tuned", STOCK_KERNELS: "stock", DEFAULT: "untuned default"}
    if row.peer == STOCK_KERNELS:
        roles[STOCK_KERNELS] = "stock, fastest peer"
    names = [TUNED, *peers, *stock, *([DEFAULT] if DEFAULT in row.times else [])]
    bars = tuple(_kernel_bar(row, name, roles.get(name, "fastest peer")) for name in names)
    keys = (row.text("label"), row.graph, direction_name(row.which), _form(row))
    return Choice(keys, bars, tuple(_kernel_facts(row)), kernel_command(row, backend, known))


def _kernel_bar(row: SuiteRow, name: str, role: str) -> Bar:
    time_us, memory = row.times.get(name, math.nan), row.memory(name)
    shown = "Equitune" if name in (TUNED, DEFAULT) else contender_name(name)
    held = "" if math.isnan(memory) else binary_text(memory)
    reason = row.reason(name) if math.isnan(time_us) else ""
    return Bar(role, shown, COLOURS.get(name, "other"), time_us, held, reason)


def _kernel_facts(row: SuiteRow) -> list[str]:
    facts = []
    if row.size:
        facts.append(row.size)
    if row.floor_us / row.time_us > 0:
        facts.append(
            f"memory alone takes {time_text(row.floor_us)}, {row.floor_us / row.time_us:.0%} of Equitune's time"
        )
    if not math.isnan(row.order_us()):
        facts.append(f"ordering a new graph takes {time_text(row.order_us())}")
    found = row.accuracy()
    if found is not None:
        facts.append(f"largest relative error {error_text(found.error)}")
    return facts


def kernels_sentence(rows: Sequence[SuiteRow], device: str) -> str:
    """What tuning gained on all rows, in one sentence."""
    normal = [row for row in rows if not row.deterministic]
    judged = [row for row in normal if not math.isnan(row.ratio)]
    if judged:
        mean, least = geometric_mean(row.ratio for row in judged), min(row.ratio for row in judged)
        text = f"On this {device}, Equitune's kernels are {floored_ratio(mean)} as fast as the fastest peer on the mean of {rows_text(len(judged))}, least {floored_ratio(least)}"  # noqa: E501
        memory = geometric_mean(row.memory(TUNED) / row.memory(row.peer) for row in judged if row.memory(row.peer) > 0)
        return text + ("." if math.isnan(memory) else f", with {ratio_text(memory)} the extra memory.")
    timed = [row for row in normal if not math.isnan(row.default_ratio)]
    if not timed:
        return "No tuned time has been published for this device yet."
    mean, least = geometric_mean(row.default_ratio for row in timed), min(row.default_ratio for row in timed)
    return f"On this {device}, tuned kernels are {floored_ratio(mean)} as fast as the untuned default on the mean of {rows_text(len(timed))}, least {floored_ratio(least)}; no peer was timed."  # noqa: E501


# The command that measures one row again, filled in.

FILE = "row.toml"


class Shipped(NamedTuple):
    """What configs may name: the keys of problems by name, and the graphs."""

    problems: dict[str, str]
    graphs: Collection[str]


def shipped() -> Shipped:
    return Shipped({name: problem.key for name, problem in load_all().items()}, load_graphs().keys())


def kernel_command(row: SuiteRow, backend: str, known: Shipped) -> Markup:
    """A config of this row alone and the command that reads it, or what to do if its config has names of its own."""
    problem, graph = row.text("label"), str(mapping(row.record.get("graph")).get("name") or "")
    own = [] if known.problems.get(problem) == row.text("problem") else [repr(problem)]
    own += [] if graph in known.graphs else [repr(graph)]
    if own:
        names = " and ".join(own)
        return tag("p", f"The config that was measured defines {names}: run equitune bench with that file.",
                   class_="hint")  # fmt: skip
    device = "cuda:0" if backend == "cuda" else "cpu"
    lines = [f"cat > {FILE} <<'END'", *config_lines(row), "END", f"equitune bench {FILE} --device {device} --fresh"]
    text = "The tuned schedule comes from the database, so nothing is searched. --fresh measures a stored row again."
    return join((commands("\n".join(lines)), tag("p", text, class_="hint")))


def config_lines(row: SuiteRow) -> list[str]:
    """A config with one workload and one pass."""
    given: dict[str, Any] = {
        "problem": row.text("label"),
        "graph": str(mapping(row.record.get("graph")).get("name")),
        **{key: row.text(key) for key in ("operation", "dtype", "layout")},
        "directions": list(row.kind.passes.get(row.which, (row.which,))),
        "passes": [row.which],
    }
    if row.deterministic:
        given["deterministic"] = True
    # Text, lists of text and true are written alike in JSON and TOML.
    return [f"{key} = {json.dumps(value)}" for key, value in given.items()]


def commands(text: str) -> Markup:
    return tag("pre", tag("code", text), tabindex="0", aria_label="Commands")


# Section that compares the devices of a results folder: a line per device, then what several of them measured.

Row = TypeVar("Row", SuiteRow, ModelRow)
DEVICES_HINT = "Kernels were measured on graphs of other sizes on each device, so the time is given for one edge: of the largest graph measured there, which is named below it."  # noqa: E501


def devices(found: Sequence[DeviceRows], here: str) -> Markup | None:
    """The whole section; None unless several devices have rows. ``here``: the slug of the page's device."""
    if len(found) < 2:
        return None
    ordered = sorted(found, key=lambda rows: (rows.slug != here, rows.slug))
    return join((_devices(ordered), _models(ordered), _kernels(ordered)))


def _devices(found: Sequence[DeviceRows]) -> Markup:
    columns = [Column("Device"), Column("Architecture"), Column("Units", True), Column("Copy bandwidth", True)]
    columns += [Column("Kernels", True, "rows"), Column("Speed-up", True, "over the fastest peer")]
    columns += [Column("Least", True), Column("Models", True, "rows")]
    columns += [Column("Speed-up", True, "over the fastest other path")]
    return table("Devices with measured rows", columns, [_device(rows) for rows in found])


def _device(rows: DeviceRows) -> list[Cell]:
    normal = [row for row in rows.suite if not row.deterministic]
    ratios = [row.ratio for row in normal if not math.isnan(row.ratio)]
    rates = [1e6 * row.bytes / row.floor_us for row in normal if row.bytes / row.floor_us > 0]
    units = rows.device.get("units")
    return [
        Cell(rows.name),
        Cell(str(rows.device.get("arch") or MISSING)),
        Cell(MISSING if units is None else f"{units:,}"),
        Cell(f"{bytes_text(max(rates))}/s" if rates else MISSING),
        Cell(str(len(rows.suite) or MISSING)),
        _mean(geometric_mean(ratios), floored_ratio),
        _mean(min(ratios, default=math.nan), floored_ratio),
        Cell(str(len(rows.models) or MISSING)),
        _mean(mean_ratio(rows.models), floored_ratio, _other_than_named(rows.models)),
    ]


def _mean(value: float, text: Callable[[float], str], note: str | None = None) -> Cell:
    return Cell(MISSING) if math.isnan(value) else Cell(text(value), value, note)


def _other_than_named(rows: Sequence[ModelRow]) -> str | None:
    """A note where a speed-up is not over what the column's head says."""
    found = compared_with(rows)
    return f"over {found}" if found == STOCK else None


def _by_key(rows: Iterable[Row], key: Callable[[Row], Hashable], size: Callable[[Row], float]) -> dict[Hashable, Row]:
    """Of the rows with a key, the timed one of the largest size."""
    found: dict[Hashable, Row] = {}
    for row in rows:
        before = found.get(key(row))
        if size(row) > 0 and (before is None or size(row) > size(before)):
            found[key(row)] = row
    return found


def _kernels(found: Sequence[DeviceRows]) -> Markup | None:
    """Kernels that several devices measured, by the time of one edge."""

    def key(row: SuiteRow) -> tuple[str, ...]:
        kind = kind_text(row.text("operation"), row.deterministic)
        return (row.text("label"), row.text("problem"), kind, row.text("dtype"), row.which)

    def edge_ns(row: SuiteRow) -> float:
        return 1e3 * row.time_us / row.edges

    by_device = [_by_key([row for row in rows.suite if edge_ns(row) > 0], key, lambda row: row.edges) for rows in found]
    shared = _shared(by_device)
    if not shared:
        return None
    columns = [Column("Problem"), Column("Pass", choice=True), Column("dtype", choice=True)]
    columns += [Column(rows.name, True, "an edge") for rows in found]
    order = {which: place for place, which in enumerate(PASSES)}
    body = []
    for label, problem, kind, dtype, which in sorted(shared, key=lambda k: (k[0], k[2], k[3], order.get(k[4], 99))):
        rows = [given.get((label, problem, kind, dtype, which)) for given in by_device]
        body.append([Cell(label, None, kind or None), Cell(direction_name(which), which), Cell(dtype),
                     *(_edge(row, edge_ns) for row in rows)])  # fmt: skip
    made = table("Tuned kernels: time of one edge", columns, body, sortable=True)
    head = tag("summary", f"Kernels measured on several devices: {len(body)}")
    return tag("details", head, tag("p", DEVICES_HINT, class_="hint"), made)


def _edge(row: SuiteRow | None, edge_ns: Callable[[SuiteRow], float]) -> Cell:
    if row is None:
        return Cell(MISSING)
    value = edge_ns(row)
    text = f"{significant(value)}\N{NO-BREAK SPACE}ns" if value < 1000 else time_text(value / 1e3)
    return Cell(text, value, f"{row.graph}, {count(row.edges)}")


def _models(found: Sequence[DeviceRows]) -> Markup | None:
    """Models that several devices measured on the same structure."""

    def key(row: ModelRow) -> tuple[str, ...]:
        return tuple(row.text(name) for name in ("model", "structure", "pass", "dtype"))

    by_device = [_by_key([row for row in rows.models if row.time_us(TUNED) > 0], key, lambda row: row.atoms)
                 for rows in found]  # fmt: skip
    shared = _shared(by_device)
    if not shared:
        return None
    columns = [Column("Model"), Column("Structure", choice=True), Column("Pass", choice=True), Column("dtype")]
    columns += [Column(rows.name, True, "over the fastest other path") for rows in found]
    body = []
    for name in sorted(shared):
        rows = [given.get(name) for given in by_device]
        which = next(row.which for row in rows if row is not None)
        times = [Cell(MISSING) if row is None else Cell(time_text(row.time_us(TUNED)), row.time_us(TUNED),
                 _gain(row)) for row in rows]  # fmt: skip
        body.append([Cell(name[0]), Cell(name[1]), Cell(which), Cell(name[3]), *times])
    return table("Models with Equitune on several devices", columns, body, sortable=True)


def _gain(row: ModelRow) -> str | None:
    if math.isnan(row.ratio):
        return None
    return " ".join(filter(None, (ratio_text(row.ratio), _other_than_named([row]))))


def _shared(by_device: Sequence[dict]) -> list:
    """Keys that at least two devices have."""
    every = dict.fromkeys(key for given in by_device for key in given)
    return [key for key in every if sum(key in given for given in by_device) > 1]


# Sections on the method (text, problems) and the provenance (device facts, versions, commands) of every number.

PROBLEM_COLUMNS = ("Problem", "First input", "Second input", "Output", "Paths", "Weights")
STEPS = (
    ("Verification", "Every schedule is checked before it is timed. It writes to outputs filled with NaN, and each block of each output and gradient is compared with e3nn in float64. A schedule whose relative error exceeds the tolerance is recorded as wrong and never timed. The table gives the winner's largest error."),  # noqa: E501
    ("Cold cache", "After warm-up calls, each sample starts with an overwritten last-level cache, as other layers of a model would leave it. In a comparison, other contenders run between two samples. In a search on a small graph, the instruction caches are also filled with other code."),  # noqa: E501
    ("Samples", "At least ten. Sampling ends when the 95% interval of the median is narrow, or when time is up. A search stops early on schedules whose first samples are far too slow. Tables show the median and the quartiles. The raw samples are below each row of the bench; those of a search's ten fastest schedules are in the packed trials."),  # noqa: E501
    ("Fresh process", "The fastest of many noisy measurements looks faster than it is. So the best three schedules of a study are measured again in a new process, in turns with the default and the peers. Only those times are published. Times of the search appear only in the progress and knob figures."),  # noqa: E501
    ("Peers", "Each peer runs in its fastest form for this device, after its own autotuning, and is checked against the same reference. If a peer's own kernels did not run, it is shown as failed, with the reason."),  # noqa: E501
    ("Traffic floor", "The compulsory bytes (every input read once, every output written once) divided by the bandwidth of a large copy on this device."),  # noqa: E501
)  # fmt: skip


def method(data: DeviceData) -> Markup:
    """How the numbers were made."""
    clock = "CUDA events around a queued call" if _backend(data) == "cuda" else "the wall clock around a call"
    steps = [tag("li", tag("strong", f"{title}. "), text) for title, text in STEPS]
    steps.insert(3, tag("li", tag("strong", "Clock. "), f"Times are taken with {clock}, in microseconds."))
    return join((tag("ul", *steps, class_="prose"), _problems(data)))


def provenance(data: DeviceData) -> Markup:
    """Where the numbers come from: device, versions and commands."""
    device = tag("div", tag("h3", "Device"), definitions(_method_facts(data)), class_="facts")
    return join((device, tag("div", tag("h3", "Software"), definitions(_software(data)), class_="facts"), _rerun(data)))


def _backend(data: DeviceData) -> str:
    return str(data.device.get("backend") or "cpu")


def _method_facts(data: DeviceData) -> list[tuple[str, Content]]:
    facts: list[tuple[str, Content]] = []
    for name, value in data.device.items():
        if not isinstance(value, dict | list) and value is not None:
            facts.append((name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)))
    bandwidths = data.rows["copy_bandwidth"].dropna()
    if len(bandwidths):
        low, high = bytes_text(bandwidths.min()), bytes_text(bandwidths.max())
        facts.append(("copy bandwidth", f"{low}/s" if low == high else f"{low}/s to {high}/s"))
    return facts


def _software(data: DeviceData) -> list[tuple[str, Content]]:
    generators = sorted({str(value) for value in data.rows["generator"].dropna()})
    versions: list[tuple[str, Content]] = [("generator", ", ".join(generators) or MISSING)]
    return versions + sorted(data.software.items())


def _problems(data: DeviceData) -> Markup | None:
    """What the labels mean."""
    rows = []
    for label, key in data.rows[["label", "problem"]].dropna().drop_duplicates().itertuples(index=False):
        parts = str(key).split("|")
        if len(parts) != 8:
            rows.append([Cell(label), Cell(str(key), kind="wrap"), *(Cell(MISSING) for _ in range(4))])
            continue
        paths = len([path for path in parts[4].split(",") if path])
        irreps = [Cell(part, kind="wrap") for part in parts[1:4]]
        rows.append([Cell(label), *irreps, Cell(count(paths)), Cell(parts[5])])
    if not rows:
        return None
    columns = [Column(name, name == "Paths") for name in PROBLEM_COLUMNS]
    return join((tag("h3", "Problems"), table("Irreps of each problem", columns, rows)))


def _rerun(data: DeviceData) -> Markup:
    device = "cuda:0" if _backend(data) == "cuda" else "cpu"
    commands = "\n".join(
        (
            f"equitune tune configs/CONFIG.toml --device {device} --seed SEED --sampler SAMPLER --trials TRIALS",
            f"equitune bench configs/CONFIG.toml --device {device}",
            f"equitune bench --suite --device {device}",
            f"equitune record configs/CONFIG.toml --device {device}",
            "equitune replay results/record/DEVICE.jsonl.gz",
            "equitune report",
        )
    )
    text = "In this order: tune and publish; compare whole passes of a config; compare all rows of the suite (an interrupted run continues); time every schedule of a small space; replay samplers on these times, without a device; rebuild this page from stored results. CONFIG.toml is the file whose workloads name the problem and graph. The other values are in the table. A finished study is resumed, not repeated: to search again, name another results folder or storage."  # noqa: E501
    shown = [tag("h3", "Run it again"), tag("p", text), tag("pre", tag("code", commands))]
    rows = [_source(entry) for entry in data.entries]
    if rows:
        columns = [Column("Problem"), Column("Direction", choice=True), Column("Sampler", choice=True)]
        columns += [Column(name, True) for name in ("Seed", "Trials", "Timed")]
        columns += [Column(name) for name in ("Raw trials, in results/", "Date", "Generator")]
        origins = table("Search behind each entry", columns, rows, sortable=True)
        summary = tag("summary", f"Search behind each entry: {count(len(rows))} searches")
        shown.append(tag("details", summary, folded(origins)))
    return join(shown)


def _source(entry: dict[str, Any]) -> list[Cell]:
    trials = entry.get("trials") if isinstance(entry.get("trials"), dict) else {}
    file = trials.get("file") if trials else None
    return [
        Cell(entry.get("label"), None, entry_note(entry)),
        Cell(direction_name(entry.get("direction"))),
        *(Cell(_shown(trials.get(name) if trials else None)) for name in ("sampler", "seed", "count", "ok")),
        Cell(tag("code", file) if file else MISSING, kind="wrap"),
        Cell(str(entry.get("date") or MISSING)[:10]),
        Cell(tag("code", entry["generator"]) if entry.get("generator") else MISSING),
    ]


def _shown(value: Any) -> str:
    return MISSING if value is None or (isinstance(value, float) and math.isnan(value)) else str(value)
