"""Second half of the page: searches, importance of knobs, winners and failures."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import pandas as pd

from autotune.measure.trial import STATES
from autotune.report.data.device_data import PANELS, DeviceData
from autotune.report.data.knob_importance import MIN_TRIALS, knob_importances, measured, searched_knobs
from autotune.report.html import figures
from autotune.report.html.knobs import knob_cell, union, value_text
from autotune.report.html.markup import Cell, Column, Markup, folded, join, table, tag
from autotune.text import DEFAULT, MISSING, count, direction_name, entry_note, kind_text

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
        drawing = figures.search_progress(trials, default_us, f"progress{place}", f"{title}, {detail}")
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
        panels = [_panel("Importance", None, figures.importance_bars(importances, f"importance{place}", what))]
        for knob in list(importances.index)[:STRIPS]:
            drawing = figures.knob_strip(trials, knob, values[knob], f"strip{place}-{knob}", what)
            panels.append(_panel(knob, "times and medians by value", drawing))
        summary = tag("summary", tag("strong", title), " ", tag("small", detail))
        parts.append(tag("details", summary, folded(tag("div", *panels, class_="panels"))))
    if short:
        parts.append(tag("p", f"Too few timed trials: {', '.join(short)}.", class_="hint"))
    return join(parts)


def _panel(title: str, note: str | None, drawing: Markup) -> Markup:
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
