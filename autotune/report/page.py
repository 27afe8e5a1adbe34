"""A device's page: its first screen, how devices compare, where the numbers come from, and all other sections."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autotune.bench.rows import SuiteRow, mapping
from autotune.report import kernels, models, tuning
from autotune.report.charts import COLOURS
from autotune.report.devices import PASSES, DeviceData, DeviceRows
from autotune.report.picker import Bar, Choice, Command, Picker
from autotune.report.render import Page, Section, render
from autotune.report.rows import met
from autotune.report.sources import write_sources
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    bytes_text,
    contender_name,
    count,
    counted,
    direction_name,
    error_text,
    floored_ratio,
    geometric_mean,
    ratio_text,
    time_text,
)
from autotune.workload.config import load_all, load_graphs


def first_screen(data: DeviceData) -> dict[str, Any]:
    """The sentence and the picker, of models if a record of them exists, else of kernels.

    joint: of models that run by Equitune and cuEquivariance together. random: whether any has random weights.
    """
    device = str(data.device["name"])
    note = objectives_sentence(data.rows)
    if not data.models:
        sentence, picker = kernels_sentence(kernel_rows(data), device) + note, kernel_picker(data)
        return {"sentence": sentence, "picker": picker, "joint": "", "random": False}
    return {
        "sentence": models.models_sentence(data.models, device) + note,
        "picker": Picker(
            "model-rows",
            models.AXES,
            tuple(map(models.model_choice, data.models)),
            models.first_model_row(data.models),
            "peak memory",
        ),
        "joint": models.joint_sentence(data.models),
        "random": any(row.random for row in data.models),
    }


# Rows of kernels to pick from, and the sentence about all of them.

KERNEL_AXES = ("Problem", "Graph", "Pass", "Form")
STOCK_KERNELS = "e3nn"
# Of rows equally near to the mean, what most readers run comes first.
USUAL = ("force_step", "forward+backward", "forward")


def kernel_picker(data: DeviceData) -> Picker | None:
    """None without rows."""
    if not (rows := kernel_rows(data)):
        return None
    choices = tuple(kernel_choice(row, data.backend) for row in rows)
    return Picker("kernel-rows", KERNEL_AXES, choices, first_kernel_row(rows), "extra memory")


def kernel_rows(data: DeviceData) -> list[SuiteRow]:
    """The bench rows, then the tuned entries that were compared with a peer and of which the bench has no row."""
    benched = {(row.kernel, row.deterministic) for row in data.suite}
    rows = [*data.suite, *(row for row in data.tuned if row.peer and (row.kernel, row.deterministic) not in benched)]
    chosen = rows or data.tuned  # tuned without peers: the default alone is there to compare with

    def order(row: SuiteRow) -> tuple[Any, ...]:
        index = PASSES.index(row.which) if row.which in PASSES else len(PASSES)
        edges = 0.0 if math.isnan(row.edges) else row.edges
        return (row.text("label"), edges, row.graph, index, _form(row))

    return sorted((row for row in chosen if row.times), key=order)


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

    return min(range(len(rows)), key=lambda index: (rows[index] not in judged, *rank(rows[index])))


def _form(row: SuiteRow) -> str:
    return ", ".join(filter(None, (row.form or "convolution", row.text("dtype"), row.text("layout"))))


def kernel_choice(row: SuiteRow, backend: str) -> Choice:
    peers = [row.peer] if row.peer and row.peer != STOCK_KERNELS else []
    names = [TUNED, *peers, *(name for name in (STOCK_KERNELS, DEFAULT) if name in row.times)]
    stock = "stock, fastest peer" if row.peer == STOCK_KERNELS else "stock"
    roles = {TUNED: "tuned", STOCK_KERNELS: stock, DEFAULT: "untuned default"}
    bars = tuple(
        Bar(
            role=roles.get(name, "fastest peer"),
            name="Equitune" if name in (TUNED, DEFAULT) else contender_name(name),
            ink=COLOURS.get(name, "other"),
            time_us=row.times.get(name, math.nan),
            memory=row.memory(name),
            reason=row.reason(name),
        )
        for name in names
    )
    keys = (row.text("label"), row.graph, direction_name(row.which), _form(row))
    return Choice(keys, bars, tuple(_kernel_facts(row)), kernel_command(row, backend))


def _kernel_facts(row: SuiteRow) -> list[str]:
    facts = [row.size] if row.size else []
    share = row.floor_us / row.time_us
    if share > 0:
        facts.append(f"memory alone takes {time_text(row.floor_us)}, {share:.0%} of Equitune's time")
    if not math.isnan(row.order_us()):
        facts.append(f"ordering a new graph takes {time_text(row.order_us())}")
    worst = row.accuracy()
    return facts if worst is None else [*facts, f"largest relative error {error_text(worst.error)}"]


def kernels_sentence(rows: Sequence[SuiteRow], device: str) -> str:
    """What tuning gained on all rows, in one sentence."""
    normal = [row for row in rows if not row.deterministic]
    judged = [row for row in normal if not math.isnan(row.ratio)]
    if judged:
        mean, least = geometric_mean(row.ratio for row in judged), min(row.ratio for row in judged)
        text = f"On this {device}, Equitune's kernels are {floored_ratio(mean)} as fast as the fastest peer on the mean of {counted(len(judged), 'row')}, at least {floored_ratio(least)}"  # noqa: E501
        memory = geometric_mean(row.memory(TUNED) / row.memory(row.peer) for row in judged if row.memory(row.peer) > 0)
        return text + ("." if math.isnan(memory) else f", in {ratio_text(memory)} the extra memory.")
    timed = [row for row in normal if not math.isnan(row.default_ratio)]
    if not timed:
        return "No tuned time has been published for this device yet."
    mean, least = geometric_mean(row.default_ratio for row in timed), min(row.default_ratio for row in timed)
    return f"On this {device}, tuned kernels are {floored_ratio(mean)} as fast as the untuned default on the mean of {counted(len(timed), 'row')}, at least {floored_ratio(least)}. No peer was timed."  # noqa: E501


def objectives_sentence(rows: Sequence[SuiteRow]) -> str:
    """How many schedules were chosen by something else than time, so that times say less of them; empty if none."""
    others = [row for row in rows if row.objectives]
    if not others:
        return ""
    by = ", ".join(sorted({row.objectives for row in others}))
    return f" The schedules of {len(others)} of {counted(len(rows), 'row')} were tuned by {by}, not by time."


# The command that measures one row again, filled in.

FILE = "row.toml"


@functools.cache
def shipped() -> tuple[dict[str, str], frozenset[str]]:
    """What configs may name: the keys of problems by name, and the graphs."""
    return {name: problem.key for name, problem in load_all().items()}, frozenset(load_graphs())


def kernel_command(row: SuiteRow, backend: str) -> Command:
    """A config of this row alone and the command that reads it, or what to do if its config has names of its own."""
    problem, graph = row.text("label"), str(mapping(row.record.get("graph")).get("name") or "")
    problems, graphs = shipped()
    own = [] if problems.get(problem) == row.text("problem") else [repr(problem)]
    own += [] if graph in graphs else [repr(graph)]
    if own:
        names = " and ".join(own)
        return Command("", f"The config that was measured defines {names}: run equitune bench with that file.")
    device = "cuda:0" if backend == "cuda" else "cpu"
    lines = [f"cat > {FILE} <<'END'", *config_lines(row), "END", f"equitune bench {FILE} --device {device} --fresh"]
    text = "The tuned schedule comes from the database, so nothing is searched. --fresh measures a stored row again."
    return Command("\n".join(lines), text)


def config_lines(row: SuiteRow) -> list[str]:
    """A config with one workload and one pass."""
    config: dict[str, Any] = {
        "problem": row.text("label"),
        "graph": str(mapping(row.record.get("graph")).get("name")),
        **{key: row.text(key) for key in ("operation", "dtype", "layout")},
        "directions": list(row.kind.passes.get(row.which, (row.which,))),
        "passes": [row.which],
    }
    if row.deterministic:
        config["deterministic"] = True
    # Text, lists of text and true are written alike in JSON and TOML.
    return [f"{key} = {json.dumps(value)}" for key, value in config.items()]


# The devices of a results folder: a line per device, then what several of them measured.


def devices(every: Sequence[DeviceRows], here: str) -> dict[str, Sequence[Any]] | None:
    """None unless several devices have rows. ``here``: the slug of the page's device, which comes first.

    models, kernels: what several of them measured, (what it is, a row per device in their order or None).
    """
    if len(every) < 2:
        return None
    ordered = sorted(every, key=lambda rows: (rows.slug != here, rows.slug))
    of_models = _shared(
        ordered,
        rows_of=lambda rows: [row for row in rows.models if row.time_us(TUNED) > 0 and row.atoms > 0],
        key=lambda row: tuple(row.text(name) for name in ("model", "structure", "pass", "dtype")),
        size=lambda row: row.atoms,
    )
    # Kernels that several devices measured on graphs of other sizes.
    of_kernels = _shared(
        ordered,
        rows_of=lambda rows: [row for row in rows.suite if row.time_us / row.edges > 0],
        key=lambda row: (
            row.text("label"),
            row.form,
            row.text("dtype"),
            row.which,
            row.text("problem"),
        ),
        size=lambda row: row.edges,
    )
    order = {which: index for index, which in enumerate(PASSES)}
    by_pass = sorted(of_kernels, key=lambda line: (*line[0][:3], order.get(line[0][3], 99)))
    return {"devices": ordered, "models": sorted(of_models, key=lambda line: line[0]), "kernels": by_pass}


def _shared(
    every: Sequence[DeviceRows],
    rows_of: Callable[..., Any],
    key: Callable[[Any], tuple[str, ...]],
    size: Callable[[Any], float],
) -> Iterator[tuple[tuple[str, ...], tuple[Any, ...]]]:
    """What at least two devices measured, a line a key: of each device the row of the largest size."""
    by_device = [{key(row): row for row in sorted(reversed(rows_of(rows)), key=size)} for rows in every]
    for shared in dict.fromkeys(key for rows in by_device for key in rows):
        rows = tuple(rows.get(shared) for rows in by_device)
        if sum(row is not None for row in rows) > 1:
            yield shared, rows


# Where the numbers come from.


def provenance(data: DeviceData) -> dict[str, Any]:
    """Names and values of the device and the software; what the labels of problems mean."""
    versions = [("generator", ", ".join(met(data.rows, "generator")) or MISSING), *sorted(data.software.items())]
    device = [
        (name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        for name, value in data.device.items()
        if not isinstance(value, dict | list) and value is not None
    ]
    if bandwidths := [rate for row in data.rows if not math.isnan(rate := row.number("copy_bandwidth"))]:
        low, high = bytes_text(min(bandwidths)), bytes_text(max(bandwidths))
        device.append(("copy bandwidth", f"{low}/s" if low == high else f"{low}/s to {high}/s"))
    return {"device": device, "software": versions, "problems": list(_problems(data))}


def _problems(data: DeviceData) -> Iterator[tuple[str, tuple[str, ...], int, str]]:
    """(label, irreps, paths, weights); paths: -1 if the key does not say it, which is then the first input alone."""
    for label, key in dict.fromkeys((row.text("label"), row.text("problem")) for row in data.rows):
        parts = key.split("|")
        if label and len(parts) == 8:
            yield label, tuple(parts[1:4]), len([path for path in parts[4].split(",") if path]), parts[5]
        elif label and key:
            yield label, (key, "", ""), -1, ""


# All of it.


def build_page(data: DeviceData, others: Sequence[DeviceRows] = ()) -> Page:
    """The page of one device. Equal data give equal text: its date is that of the newest record.

    others: the rows of all devices of the results folder, this one's included.
    """
    # Each row that opens, with its tuned schedules by direction.
    opened = [(row.record, row.schedules(TUNED)) for row in data.suite]
    opened += [(row.record, tuning.entry_schedules(row)) for row in data.tuned]
    sources = write_sources(opened, data.device)
    shown = {
        "models": data.models,
        "largest": models.largest(data.largest),
        "roofline": kernels.roofline(data),
        "devices": devices(others, data.slug),
    }
    return render(
        "device.html",
        data.slug,
        sources.texts,
        data=data,
        dates=sorted({date[:10] for date in met((*data.rows, *data.models), "date")}),
        screen=first_screen(data),
        sections=[section for section in _sections(data, others) if shown.get(section.anchor, True)],
        picked=kernel_picker(data) if data.models else None,  # else it is the first screen
        kernels=kernels.kernels(data.suite, sources),
        search=tuning.search(data, sources),
        provenance=provenance(data),
        **shown,
    )


def _sections(data: DeviceData, others: Sequence[DeviceRows]) -> list[Section]:
    searched = f"{count(len(data.tuned))} tuned kernels, {count(len(data.trials))} trials"
    names = ", ".join(rows.name for rows in others)
    return [
        Section("models", "Models", "models.html"),
        Section("largest", "Largest crystal that fits", "largest.html"),
        Section("kernels", "Kernels", "kernels.html"),
        Section("roofline", "Roofline", "roofline.html", "kernels against the device's memory"),
        Section("devices", "Devices compared", "devices.html", names),
        Section("search", "The search", "search.html", searched),
        Section("method", "How it was measured", "method.html", "values first, cold caches, in turns"),
        Section("provenance", "Provenance", "provenance.html", "device, versions, commands, generators, hashes"),
    ]
