"""The sections about tuning: the search, the tuned rows, and replays of records."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from autotune.measure.trial import STATES
from autotune.report import charts
from autotune.report.charts import knob_cell, samples, union, value_text
from autotune.report.devices import PANELS, DeviceData
from autotune.report.markup import Cell, Column, Group, Markup, folded, grouped_table, join, table, tag
from autotune.report.rows import MIN_TRIALS, knob_importances, mapping, measured, number, searched_knobs
from autotune.report.sources import Sources
from autotune.text import (
    DEFAULT,
    MISSING,
    TUNED,
    TimeUnit,
    bytes_text,
    contender_name,
    count,
    direction_name,
    entry_note,
    error_text,
    floored_ratio,
    kind_text,
    time_text,
    unit_for,
    without_time,
)

# Second half of the page: searches, importance of knobs, winners and failures.

STRIPS = 2
# Number of visible search panels; the others are folded.
SHOWN = 12
REASONS = 4
REASON_CHARS = 220


def _studies(data: DeviceData) -> list[tuple[str, str, str, pd.DataFrame, float]]:
    """(title, detail, file stem, trials, default's published time) of each study, first those of entries, in order."""
    by_file = {str(name): trials for name, trials in data.trials.groupby("file", sort=True)}
    found = []
    for row, record in data.rows[data.rows["source"] == "tuned"].iterrows():
        trials = by_file.pop(str(record["study"]), None)
        if trials is not None:
            default = data.time(row, DEFAULT)
            title = f"{record['label']} \N{MIDDLE DOT} {direction_name(record['direction'])}"
            kind = kind_text(record["operation"], record["deterministic"])
            facts = (record["graph"] or record["graph_class"], kind, record["dtype"], record["layout"])
            detail = ", ".join(str(fact) for fact in facts if fact)
            default_us = math.nan if default is None else float(default["time_us"])
            found.append((title, detail, str(record["study"]), trials, default_us))
    found += [(name, "no published entry", name, trials, math.nan) for name, trials in by_file.items()]
    return found


def _drawn(studies: list[tuple]) -> tuple[list[tuple], Markup | None]:
    """The studies with the most trials, in their order, and a note on the others."""
    if len(studies) <= PANELS:
        return studies, None
    longest = sorted(range(len(studies)), key=lambda place: (-len(studies[place][3]), place))[:PANELS]
    text = f"The figures show the {PANELS} of {len(studies)} studies with the most trials."
    return [studies[place] for place in sorted(longest)], tag("p", text, class_="hint")


def progress(data: DeviceData) -> Markup:
    """One panel per study."""
    panels = []
    studies, others = _drawn(_studies(data))
    for place, (title, detail, _, trials, default_us) in enumerate(studies):
        drawing = charts.search_progress(trials, default_us, f"progress{place}", f"{title}, {detail}")
        note = f"{detail} \N{MIDDLE DOT} {count(len(trials))} trials, {count(len(measured(trials)))} timed"
        panels.append(tag("figure", tag("figcaption", title, tag("small", note)), drawing))
    if not panels:
        return tag("p", "No raw trials are stored for this device.", class_="hint")
    hint = "Each dot is a timed trial. The line is the best so far, the dashed line the untuned default. Marks above the plot are failed trials, one lane per state."  # noqa: E501
    lines = data.unreadable_lines
    torn = tag("p", f"{lines} unreadable lines of the trial files were skipped.", class_="hint") if lines else None
    shown, more = (tag("div", *some, class_="panels") for some in (panels[:SHOWN], panels[SHOWN:]))
    rest = (
        tag("details", tag("summary", f"{len(panels) - SHOWN} more studies"), folded(more)) if panels[SHOWN:] else None
    )
    return join((tag("p", hint, class_="hint"), others, shown, rest, torn))


def knobs(data: DeviceData) -> Markup:
    """Importances of all studies in one table, then each study's bars with strips of its most important knobs."""
    studies = [(*study, knob_importances(study[3])) for study in _studies(data)]
    told = [study for study in studies if len(study[5])]
    short = [f"{study[0]} ({study[1]})" for study in studies if not len(study[5])]
    if not told:
        hint = f"No study has {MIN_TRIALS} timed trials with a knob that varied: too few to rank the knobs."
        return tag("p", hint, class_="hint")
    text = "Two measures, computed from the raw trials. PED-ANOVA (Optuna): how well a knob separates the fastest quarter of the timed trials from all trials; the shares of a study add up to 100%. Variance explained: the share of the variance of log time between the values of one knob. Samplers prefer fast regions, so neither is a controlled experiment."  # noqa: E501
    drawn, others = _drawn(told)
    parts: list[Markup | None] = [tag("p", text, class_="hint"), _importance_table(told), others]
    for place, (title, detail, _, trials, _, importances) in enumerate(drawn):
        what = f"{title}, {detail}"
        values = searched_knobs(trials)
        panels = [_knob_panel("Importance", None, charts.importance_bars(importances, f"importance{place}", what))]
        for knob in list(importances.index)[:STRIPS]:
            drawing = charts.knob_strip(trials, knob, values[knob], f"strip{place}-{knob}", what)
            panels.append(_knob_panel(knob, "times and medians by value", drawing))
        summary = tag("summary", tag("strong", title), " ", tag("small", detail))
        parts.append(tag("details", summary, folded(tag("div", *panels, class_="panels"))))
    if short:
        parts.append(tag("p", f"Too few timed trials: {', '.join(short)}.", class_="hint"))
    return join(parts)


def _knob_panel(title: str, note: str | None, drawing: Markup) -> Markup:
    return tag("figure", tag("figcaption", title, tag("small", note) if note else None), drawing)


def _importance_table(told: list[tuple]) -> Markup:
    names = list(pd.concat([study[5]["importance"] for study in told]).groupby(level=0).sum().sort_values().index[::-1])
    columns = [Column("Study"), *(Column(name, True) for name in names)]
    rows = []
    for title, detail, _, _, _, importances in told:
        cells = [Cell(title, title, detail)]
        for name in names:
            if name not in importances.index:
                cells.append(Cell(MISSING))
                continue
            share, explained = (float(value) for value in importances.loc[name, ["importance", "explained"]])
            # Cells sort by their text, without a separate value: a page has thousands of them.
            cells.append(Cell(f"{share:.0%}", None, f"{explained:.0%}", "heat", style=f"--share:{share:.2g}"))
        rows.append(cells)
    caption = "Knob importance by study (PED-ANOVA); below it, variance explained"
    return table(caption, columns, rows, sortable=True)


def winners(data: DeviceData) -> Markup:
    """Knobs of every published schedule, with differences from the default marked, then the compiler's report."""
    if not data.entries:
        return tag("p", "No schedule has been published for this device.", class_="hint")
    names = union(entry.get("schedule") for entry in data.entries)
    names = [name for name in names if name != "backend"]
    columns = [Column("Problem"), Column("Direction", choice=True), *(Column(name, True) for name in names)]
    rows = []
    for entry in data.entries:
        chosen = entry.get("schedule") or {}
        default = (entry.get("default") or {}).get("schedule") or {}
        rows.append([*_identity(entry), *(knob_cell(chosen.get(n), default.get(n), bool(default)) for n in names)])
    text = "A dot marks knobs that differ from the untuned default; the default value is below."
    hint = tag("p", text, class_="hint")
    return join((hint, table("Winning schedules", columns, rows, sortable=True), _resource_table(data)))


def _resource_table(data: DeviceData) -> Markup | None:
    names = union(entry.get("resources") for entry in data.entries)
    if not names:
        return None
    columns = [
        Column("Problem"),
        Column("Direction", choice=True),
        *(Column(name.replace("_", " "), True) for name in names),
    ]
    rows = [[*_identity(entry), *(Cell(value_text((entry.get("resources") or {}).get(name))) for name in names)]
            for entry in data.entries]  # fmt: skip
    made = table("Resources reported by the compiler", columns, rows, sortable=True)
    return tag(
        "details", tag("summary", f"Resources reported by the compiler: {count(len(rows))} kernels"), folded(made)
    )


def _identity(entry: dict[str, Any]) -> tuple[Cell, Cell]:
    return Cell(entry.get("label"), None, entry_note(entry)), Cell(direction_name(entry.get("direction")))


def failures(data: DeviceData) -> Markup:
    """States of all trials, with shares and most frequent reasons."""
    trials = data.trials
    if trials.empty:
        return tag("p", "No raw trials are stored for this device.", class_="hint")
    states = trials["state"].where(trials["state"].isin(STATES), "other")
    rows = []
    for state in (*STATES, "other"):
        chosen = trials[states == state]
        if chosen.empty and state in ("other", "ok"):
            continue
        share = len(chosen) / len(trials)
        reasons = Markup(MISSING) if state == "ok" or chosen.empty else _reasons(chosen["reason"])
        rows.append([Cell(state), Cell(count(len(chosen)), len(chosen)), Cell(f"{share:.1%}", share),
                     Cell(reasons, kind="wrap")])  # fmt: skip
    columns = [Column("State"), Column("Trials", True), Column("Share", True), Column("Most frequent reasons")]
    return table(f"Outcomes of {count(len(trials))} trials", columns, rows)


def _reasons(reasons: pd.Series) -> Markup:
    """Frequent reasons; those that differ only in numbers count as one, shown by its first example."""
    counts: Counter[str] = Counter()
    example: dict[str, str] = {}
    for reason in reasons:
        given = reason.strip() if isinstance(reason, str) else ""
        lines = given.splitlines() or ["no reason recorded"]
        text = lines[0] if len(lines[0]) <= REASON_CHARS else lines[0][: REASON_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
        kind = re.sub(r"\d+(\.\d+)?", "#", text)
        counts[kind] += 1
        example.setdefault(kind, text)
    shown = [tag("div", f"{number}× ", example[kind]) for kind, number in counts.most_common(REASONS)]
    rest = len(counts) - len(shown)
    return join((*shown, tag("small", f"and {rest} other reasons") if rest > 0 else None))


# Table of all tuned rows with their expandable details.


def entry_schedules(entry: dict[str, Any]) -> dict[str, Any]:
    """Direction to knobs, as in bench rows."""
    knobs = mapping(entry.get("schedule"))
    return {str(entry.get("direction")): knobs} if knobs else {}


def row_table(data: DeviceData, sources: Sources) -> Markup | None:
    """Every tuned row, sortable, with schedule, source and samples below; reasons of failed peers as notes."""
    rows = data.rows[data.rows["source"] == "tuned"]
    if rows.empty:
        return None
    # Our columns come before the peers', which may need scrolling.
    ours = [name for name in data.contenders("tuned") if name in (TUNED, DEFAULT)]
    peers = [name for name in data.contenders("tuned") if name not in ours]
    unit = unit_for(data.times[data.times["row"].isin(rows.index)]["time_us"])
    notes: dict[str, int] = {}
    columns = [Column("Problem"), Column("Direction", choice=True), Column("dtype", note="layout", choice=True)]
    columns += [Column("Graph", note="edges", choice=True)]
    spread = f"{unit.name}, quartiles"
    columns += [Column(_head_name(name), True, spread if name == TUNED else unit.name) for name in ours]
    columns += [Column("Speed-up", True, "over the fastest peer"), Column("Traffic floor", True, "floor / tuned")]
    columns.append(Column("Largest error", True, "relative, allowed"))
    columns += [Column(_head_name(name), True, unit.name) for name in peers]
    body: list[Group] = []
    for row, record in rows.iterrows():
        cells = [
            Cell(record["label"], record["label"], kind_text(record["operation"], record["deterministic"]) or None),
            Cell(direction_name(record["direction"]), str(record["direction"])),
            Cell(record["dtype"], f"{record['dtype']} {record['layout']}", record["layout"]),
            Cell(record["graph"] or MISSING, record["graph_class"], count(record["edges"])),
        ]
        cells += [_time_cell(data.time(row, name), name, unit, notes) for name in ours]
        cells += [_ratio_cell(data, row), _floor_cell(data, row), _error_cell(record)]
        cells += [_time_cell(data.time(row, name), name, unit, notes) for name in peers]
        # The first rows of the frame are the entries, in their order.
        body.append(Group(cells, _details(data, data.entries[int(str(row))], sources)))
    caption = "Tuned rows: medians of the final interleaved measurement"
    listing = tag("ol", *(tag("li", reason) for reason in notes), class_="notes") if notes else None
    return join((grouped_table(caption, columns, body), listing))


def best_peer(data: DeviceData, row: int) -> tuple[str, float] | None:
    """The fastest peer of a row, and the tuned kernel's speed-up over it."""
    tuned = data.time(row, TUNED)
    peers = data.times[(data.times["row"] == row) & ~data.times["contender"].isin([TUNED, DEFAULT])]
    peers = peers[peers["time_us"].notna()]
    if tuned is None or math.isnan(tuned["time_us"]) or peers.empty:
        return None
    fastest = peers.loc[peers["time_us"].idxmin()]
    return str(fastest["contender"]), float(fastest["time_us"] / tuned["time_us"])


def _head_name(name: str) -> str:
    return {TUNED: "Tuned", DEFAULT: "Default"}.get(name, contender_name(name))


def _time_cell(record: pd.Series | None, name: str, unit: TimeUnit, notes: dict[str, int]) -> Cell:
    if record is None:
        return Cell(MISSING)
    if math.isnan(record["time_us"]):
        reason = f"{contender_name(name)}: {record['error']}"
        place = notes.setdefault(reason, len(notes) + 1)
        word = without_time(str(record["error"]))
        return Cell(join((f"{word} ", tag("sup", place))), None, None, "failed", reason)
    low, high = record["q1_us"], record["q3_us"]
    spread = f"{unit.text(low)}\N{EN DASH}{unit.text(high)}" if math.isfinite(low) and math.isfinite(high) else None
    if name == TUNED:
        return Cell(unit.text(record["time_us"]), record["time_us"], spread, "best")
    title = f"quartiles {spread} {unit.name}" if spread else None
    return Cell(unit.text(record["time_us"]), record["time_us"], None, "", title)


def _ratio_cell(data: DeviceData, row: int) -> Cell:
    found = best_peer(data, row)
    if found is None:
        return Cell(MISSING)
    name, ratio = found
    return Cell(f"{ratio:,.2f}×", ratio, contender_name(name), "slow" if ratio < 1 else "")


def _floor_cell(data: DeviceData, row: int) -> Cell:
    record, tuned = data.rows.loc[row], data.time(row, TUNED)
    if tuned is None or math.isnan(tuned["time_us"]) or math.isnan(record["floor_us"]):
        return Cell(MISSING)
    share = record["floor_us"] / tuned["time_us"]
    return Cell(f"{share:.1%}", share, time_text(record["floor_us"]), title=f"{bytes_text(record['bytes'])} compulsory")


def _error_cell(record: pd.Series) -> Cell:
    if not record["error_slot"]:
        return Cell(MISSING)
    value, tolerance = record["error"], record["tolerance"]
    allowed = None if math.isnan(tolerance) else f"\N{LESS-THAN OR EQUAL TO} {error_text(tolerance)}"
    bad = math.isnan(value) or value > tolerance
    sort = None if math.isnan(value) else value
    return Cell(error_text(value), sort, allowed, "slow" if bad else "", f"largest for output {record['error_slot']}")


def _details(data: DeviceData, entry: dict[str, Any], sources: Sources) -> Markup | None:
    """A closed ``details`` element, or None if the entry has no schedule."""
    chosen = mapping(entry.get("schedule"))
    if not chosen:
        return None
    default = mapping(mapping(entry.get("default")).get("schedule"))
    names = [name for name in union([chosen]) if name != "backend"]
    cells = [knob_cell(chosen.get(name), default.get(name), bool(default)) for name in names]
    what = f"{entry.get('label')}, {direction_name(entry.get('direction'))}, {entry_note(entry)}"
    knobs = table(f"Schedule: {what}", [Column(name, True) for name in names], [cells]) if names else None
    drawn = samples({TUNED: _searched(data, entry)}, f"{what}, in the search")
    kernels = (entry, entry_schedules(entry))
    source = sources.of(*kernels)
    certified = _certificate(entry, what)
    parts = ["schedule", *(["certificate"] if certified else []), *(["source"] if sources.written(*kernels) else [])]
    parts += ["raw samples of the search"] if drawn else []
    shown = tag("div", folded(join((knobs, certified, source, drawn))), class_="opened")
    return tag("details", tag("summary", ", ".join(parts)), shown)


def _certificate(entry: dict[str, Any], what: str) -> Markup | None:
    """What is known about a published kernel besides its times; older entries have no certificate."""
    known, gain = mapping(entry.get("certificate")), mapping(entry.get("gain"))
    if not known:
        return None
    errors = mapping(entry.get("errors"))
    cells = [
        Cell(", ".join(f"{slot} {error_text(number(error))}" for slot, error in errors.items()) or MISSING),
        Cell(error_text(number(known["equivariance"])) if "equivariance" in known else MISSING),
        Cell("yes" if known.get("bitwise") else "no"),
        Cell(count(number(known.get("edges")))),
        Cell(_gain_text(gain)),
        Cell(str(entry.get("source") or MISSING)),
        Cell(str(known.get("environment") or MISSING)),
    ]
    columns = [Column("Errors", note="against float64"), Column("Equivariance", True, "relative error")]
    columns += [Column("Reproducible", note="bit for bit"), Column("Edges", True, "checked")]
    columns += [Column("Gain over the default"), Column("Source", note="hash"), Column("Environment", note="hash")]
    return table(f"Certificate: {what}", columns, [cells])


def _gain_text(gain: dict[str, Any]) -> str:
    if not gain:
        return "no gain beyond the noise; the default schedule is published"
    ratio, low, high, level = (number(gain.get(key)) for key in ("ratio", "low", "high", "level"))
    return f"{ratio:.3f}\N{MULTIPLICATION SIGN} ({low:.3f} to {high:.3f} at {level:.0%})"


def _searched(data: DeviceData, entry: dict[str, Any]) -> list[float]:
    """Samples from this schedule's trials: an entry only stores median and quartiles of its published samples."""
    file = str(mapping(entry.get("trials")).get("file")).rpartition("/")[2].removesuffix(".jsonl")
    trials = data.trials[data.trials["file"] == file]
    given = zip(trials["schedule"], trials["samples_us"], strict=True)
    return [time for schedule, times in given if schedule == entry.get("schedule") for time in times]


# Section that compares samplers: a table and a figure per record, from replays of recorded trials.

SAMPLERS = {"tpe": "TPE", "climb": "TPE and neighbours", "gp": "GP", "random": "random", "default": "default order"}
NEAR = "0.05"


def replays(records: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The whole section; ``records``: file name to content."""
    told = {name: record for name, record in records.items() if mapping(record.get("samplers"))}
    if not told:
        text = "No replay is stored for this device. To compare samplers on recorded trials, run equitune replay."
        return tag("p", text, class_="hint")
    hint = "Every sampler searched the same recorded schedules, once per seed, without the device. The table gives the trials until a schedule within 5% of the best was found: the median over seeds, and below it the range. The curves show the median of best so far / best of the record; dashed: 5% above the best."  # noqa: E501
    panels = [_replay_panel(name, record, place) for place, (name, record) in enumerate(told.items())]
    return join((tag("p", hint, class_="hint"), _table(told), _transfers(told), tag("div", *panels, class_="panels")))


def sampler_name(key: str) -> str:
    """The shown name; ``default_order`` and ``default`` both mean the default order."""
    return SAMPLERS.get(key.lower().replace("_order", "").replace("-order", "").removesuffix(" order"), key)


def _samplers(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Samplers by shown name, the usual ones first."""
    found = {sampler_name(str(key)): mapping(value) for key, value in mapping(record.get("samplers")).items()}
    order = [*SAMPLERS.values()]
    return {name: found[name] for name in sorted(found, key=lambda n: (order.index(n) if n in order else 9, n))}


def trials_text(per_seed: Any) -> tuple[str, float, str | None]:
    """(median, its number or NaN, range) of trials by seed; a seed that never reached it counts as largest."""
    given = per_seed if isinstance(per_seed, list) else []
    if not given:
        return MISSING, math.nan, None
    counts = sorted(math.inf if math.isnan(number(value)) else number(value) for value in given)
    middle = len(counts) // 2
    median = counts[middle] if len(counts) % 2 else (counts[middle - 1] + counts[middle]) / 2
    never = sum(math.isinf(value) for value in counts)
    low, high = ("never" if math.isinf(value) else count(value) for value in (counts[0], counts[-1]))
    spread = low if low == high else f"{low}\N{EN DASH}{high}" if not never else f"{low} to never"
    note = f"{spread}, {len(counts) - never} of {len(counts)} seeds" if never else f"{spread}, {len(counts)} seeds"
    if math.isinf(median):
        return "not reached", math.nan, note
    return f"{median:,.0f}" if median == int(median) else f"{median:,.1f}", median, note


def _table(records: Mapping[str, Mapping[str, Any]]) -> Markup:
    names: dict[str, None] = {}
    for record in records.values():
        names |= dict.fromkeys(_samplers(record))
    columns = [Column("Record"), Column("Schedules", True), Column("Trials", True, "a search"), Column("Best", True)]
    columns += [Column("Default", True, "default / best")]
    columns += [Column(name, True, "trials to within 5%") for name in names]
    body = []
    for name, record in records.items():
        best_us, default_us = number(record.get("best_us")), number(record.get("default_us"))
        ratio = default_us / best_us if best_us > 0 else math.nan
        cells = [
            Cell(_title(name, record), None, _detail(name, record)),
            Cell(count(number(record.get("space_size")))),
            Cell(count(number(record.get("trials")))),
            Cell(time_text(best_us)),
            Cell(time_text(default_us), None, None if math.isnan(ratio) else floored_ratio(ratio)),
        ]
        samplers = _samplers(record)
        found = {key: trials_text(mapping(samplers.get(key, {}).get("trials_to")).get(NEAR)) for key in names}
        least = min((median for _, median, _ in found.values() if not math.isnan(median)), default=math.nan)
        for text, median, spread in found.values():
            cells.append(Cell(text, None if math.isnan(median) else median, spread, "best" if median == least else ""))
        body.append([*cells, _pruned(record)])
    columns.append(Column("Pruned", True, "too many spills"))
    return table("Trials until within 5% of the best", columns, body)


def _transfers(records: Mapping[str, Mapping[str, Any]]) -> Markup | None:
    """Trials that the tuner's sampler saves by starting from other kernels' winners; None without such data."""
    body = []
    for name, record in records.items():
        told = mapping(record.get("transfer"))
        sampler = sampler_name(str(told.get("sampler")))
        without, median, spread = trials_text(mapping(_samplers(record).get(sampler, {}).get("trials_to")).get(NEAR))
        for origin, found in mapping(told.get("from")).items():
            text, moved, note = trials_text(mapping(mapping(found).get("trials_to")).get(NEAR))
            saved = median - moved
            cells = [Cell(_title(name, record), None, _detail(name, record)), Cell(sampler), Cell(str(origin))]
            cells += [Cell(count(number(mapping(found).get("starts"))))]
            cells += [Cell(without, None if math.isnan(median) else median, spread)]
            cells += [Cell(text, None if math.isnan(moved) else moved, note)]
            body.append([*cells, Cell(MISSING if math.isnan(saved) else f"{saved:,.0f}")])
    if not body:
        return None
    columns = [Column("Record"), Column("Sampler"), Column("Starts from winners of"), Column("Starts", True)]
    columns += [Column("Without", True, "trials to within 5%"), Column("With", True, "trials to within 5%")]
    return table(
        "Trials saved by starting from winners of other kernels", [*columns, Column("Saved", True, "trials")], body
    )


def _title(name: str, record: Mapping[str, Any]) -> str:
    facts = [direction_name(record[key]) for key in ("label", "direction") if record.get(key)]
    return " \N{MIDDLE DOT} ".join(facts) or name


def _detail(name: str, record: Mapping[str, Any]) -> str:
    graph = record.get("graph")
    facts = [mapping(graph).get("name") or graph, *(record.get(key) for key in ("operation", "dtype", "layout"))]
    return ", ".join(fact for fact in facts if isinstance(fact, str) and fact) or name


def _pruned(record: Mapping[str, Any]) -> Cell:
    """Number of schedules that pruning would have skipped, and the fastest of them over the best."""
    told = mapping(record.get("pruning"))
    skipped, fastest = number(told.get("skipped")), number(told.get("fastest_skipped"))
    if math.isnan(skipped):
        return Cell(MISSING)
    return Cell(count(skipped), skipped, None if math.isnan(fastest) else f"fastest {floored_ratio(fastest)} the best")


def _replay_panel(name: str, record: Mapping[str, Any], place: int) -> Markup | None:
    curves = {
        sampler: [number(ratio) for ratio in found["curve"]]
        for sampler, found in _samplers(record).items()
        if isinstance(found.get("curve"), list) and found["curve"]
    }
    if not curves:
        return None
    title, detail = _title(name, record), _detail(name, record)
    drawing = charts.sampler_curves(curves, f"replay{place}", f"{title}, {detail}")
    note = f"{detail} \N{MIDDLE DOT} median best so far / best of the record"
    return tag("figure", tag("figcaption", title, tag("small", note)), drawing)
