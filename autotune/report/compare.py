"""Compare two bench records (files or folders): pairs of rows with verdicts.

Rows pair by identity (``autotune.bench.rows.identity_of``), so the records may be of one device before and after a
change, or of two devices. A verdict uses the raw samples of both rows, not only their medians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.bench.rows import identity_of
from autotune.database.store import is_slug
from autotune.errors import ReportError
from autotune.measure.timing import (
    FASTER,
    LEVEL,
    RESAMPLES,
    SAME,
    SLOWER,
    TOLERANCE,
    UNCLEAR,
    VERDICTS,
    ratio_interval,
    verdict,
)
from autotune.report.charts import ratio_dots, strips, union, value_text
from autotune.report.kernels import passes, row_cells, rows_text
from autotune.report.markup import Cell, Column, Group, Markup, Section, document, grouped_table, join, table, tag
from autotune.report.rows import SuiteRow, mapping
from autotune.text import MISSING, TUNED, contender_name, direction_name, floored_ratio, geometric_mean, time_text
from kernelgen.errors import cause_of
from kernelgen.files import parse_json

ONE_MEASUREMENT = "one measurement"
EXPECTED = "expected a bench record (results/bench/DEVICE.json) or a results folder with one"


@dataclass(frozen=True)
class Record:
    """One bench file: its path, its device, and its rows by identity."""

    path: Path
    device: dict[str, Any]
    rows: Mapping[tuple[Any, ...], SuiteRow]

    @property
    def name(self) -> str:
        return str(self.device.get("name") or self.path.stem)

    @property
    def slug(self) -> str:
        """The device's slug, for the page's file name; the record's value is used only if it is a plain name."""
        given = self.device.get("slug")
        return str(given) if is_slug(given) else self.path.stem

    def met(self, key: str) -> list[str]:
        """All values of a field of rows, such as the generator, in order."""
        return sorted({row.text(key) for row in self.rows.values()} - {""})

    @property
    def software(self) -> dict[str, str]:
        """Version by name, or all versions that occur in the rows."""
        found: dict[str, set[str]] = {}
        for row in self.rows.values():
            for name, version in mapping(row.record.get("software")).items():
                found.setdefault(str(name), set()).add(str(version))
        return {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}


@dataclass(frozen=True)
class Judgement:
    """Judgement of one contender: ratio is before over after (above 1: faster after), NaN if a side has no time.

    reason: why the verdict was made without an interval.
    """

    ratio: float
    interval: tuple[float, float]
    verdict: str
    reason: str | None = None


@dataclass(frozen=True)
class Pair:
    """One row, as in the record before and in the record after."""

    before: SuiteRow
    after: SuiteRow

    def contenders(self) -> list[str]:
        """Contenders of both rows, in the order of their times."""
        return [name for name in self.after.times if name in self.before.times]


@dataclass(frozen=True)
class Comparison:
    """Pairs and their judgements by contender, in the order of the record before; then rows of one record only."""

    before: Record
    after: Record
    level: float
    tolerance: float
    pairs: tuple[Pair, ...]
    judged: tuple[dict[str, Judgement], ...]
    only_before: tuple[SuiteRow, ...] = field(default=())
    only_after: tuple[SuiteRow, ...] = field(default=())

    def ours(self) -> Iterable[tuple[Pair, Judgement]]:
        """Pairs with the judgement of the tuned kernel."""
        return zip(self.pairs, (judged[TUNED] for judged in self.judged), strict=True)


def compare(before: Record, after: Record, level: float = LEVEL, tolerance: float = TOLERANCE) -> Comparison:
    """Compare every row of both records."""
    pairs = [Pair(row, after.rows[identity]) for identity, row in before.rows.items() if identity in after.rows]
    judged = [{name: judge(pair, name, level, tolerance) for name in {TUNED: 0, **dict.fromkeys(pair.contenders())}}
              for pair in pairs]  # fmt: skip
    only = [tuple(row for identity, row in one.rows.items() if identity not in other.rows)
            for one, other in ((before, after), (after, before))]  # fmt: skip
    return Comparison(before, after, level, tolerance, tuple(pairs), tuple(judged), *only)


def judge(pair: Pair, contender: str, level: float = LEVEL, tolerance: float = TOLERANCE) -> Judgement:
    """Judge one contender of one row."""
    times = [row.times.get(contender, math.nan) for row in (pair.before, pair.after)]
    ratio, unknown = times[0] / times[1], (0.0, math.inf)
    failed = [side for side, time in zip(("before", "after"), times, strict=True) if math.isnan(time)]
    if failed:
        return Judgement(ratio, unknown, UNCLEAR, f"no time {' and '.join(failed)}")
    theirs, ours = pair.before.samples(contender), pair.after.samples(contender)
    if not theirs or not ours:
        sides = [side for side, given in (("before", theirs), ("after", ours)) if not given]
        return Judgement(ratio, unknown, UNCLEAR, f"no raw samples {' and '.join(sides)}")
    if theirs == ours:
        # A record continued from an older one keeps its rows: nothing was measured twice.
        return Judgement(1.0, (1.0, 1.0), SAME, ONE_MEASUREMENT)
    interval = ratio_interval(ours, theirs, level)
    reason = "too few samples" if math.isinf(interval[1]) else None
    return Judgement(ratio, interval, verdict(interval, tolerance), reason)


def load_record(path: Path) -> Record:
    """A bench file, or the one in a results folder; ReportError for anything else."""
    file = _bench_file(path)
    try:
        data = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ReportError(f"{file}: not readable as JSON ({cause_of(error)}); {EXPECTED}") from error
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise ReportError(f"{file}: holds no list 'rows'; {EXPECTED}")
    found: dict[tuple[Any, ...], SuiteRow] = {}
    for place, row in enumerate(rows):
        try:
            found[identity_of(row)] = SuiteRow(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(
                f"{file}: row {place} does not say what it is about ({error!r}); write it anew with equitune bench"
            ) from error
    return Record(file, mapping(data.get("device")), found)


def _bench_file(path: Path) -> Path:
    if not path.exists():
        raise ReportError(f"{path}: there is no such file or folder; {EXPECTED}")
    if path.is_file():
        return path
    folder = path / "bench" if (path / "bench").is_dir() else path
    files = sorted(file for file in folder.glob("*.json") if "." not in file.stem)
    if len(files) != 1:
        names = ", ".join(str(file) for file in files) or "none"
        raise ReportError(f"{path}: holds {len(files)} bench records ({names}); name the one to compare")
    return files[0]


# The page that compares two records: a Comparison as a complete HTML document.

KINDS = {FASTER: "faster", SLOWER: "slow"}


def build_comparison(data: Comparison) -> str:
    """The whole document. Equal records give equal text."""
    before, after = data.before, data.after
    title = before.name if before.name == after.name else f"{before.name} and {after.name}"
    header = (
        tag("p", "Equitune comparison of two bench records", class_="meta"),
        tag("h1", title),
        tag("p", sentence(data), class_="lead"),
    )
    hint = "Click a column head to sort. Click the line below a row to see all contenders and raw samples."
    sections = [
        Section("verdicts", "Verdicts", _verdicts(data)),
        Section("rows", "Rows in both records", join((tag("p", hint, class_="hint screen"), _rows(data)))),
        Section("alone", "Rows in one record only", _alone(data)),
        Section("records", "The two records", _records(data)),
        Section("method", "How verdicts are made", _method(data)),
    ]
    return document(f"Equitune: {title} compared", header, sections, None)


def sentence(data: Comparison) -> str:
    """The result in plain words."""
    if not data.pairs:
        return "The two records have no row in common."
    counts = Counter(judged.verdict for _, judged in data.ours())
    told = ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
    mean = geometric_mean(judged.ratio for _, judged in data.ours())
    end = "" if math.isnan(mean) else f" Geometric mean speed-up of the tuned kernels: {floored_ratio(mean)}."
    kept = sum(judged.reason == ONE_MEASUREMENT for _, judged in data.ours())
    end += f" {rows_text(kept)} are in both records but were measured once." if kept else ""
    return f"Of {rows_text(len(data.pairs))} in both records, after against before: {told}.{end}"


def _verdicts(data: Comparison) -> Markup:
    """Counts and means by pass, for our kernels and the peers, which show changes of the machine."""
    if not data.pairs:
        return tag("p", "The records have no row in common.", class_="hint")
    columns = [Column("Contender"), Column("Pass"), Column("Rows", True), *(Column(name, True) for name in VERDICTS)]
    columns.append(Column("Mean ratio", True, "before / after"))
    body, lanes = [], {}
    names = dict.fromkeys(name for judged in data.judged for name in judged)
    for name in names:
        for which in passes(pair.before for pair in data.pairs):
            judged = [found[name] for pair, found in zip(data.pairs, data.judged, strict=True)
                      if pair.before.which == which and name in found]  # fmt: skip
            if not judged:
                continue
            body.append([Cell(contender_name(name)), Cell(direction_name(which), which), *_counts(judged)])
            known = [found.ratio for found in judged if not math.isnan(found.ratio)]
            if name == TUNED and known:
                lanes[direction_name(which)] = known
    text = "A ratio above 1 means that the later record is faster. The peers serve as a control: their code is the same in both records, so a ratio other than 1 shows a change of the device or its software."  # noqa: E501
    note = "One dot per row, logarithmic axis. Bars, numbers: geometric means. Shaded: slower after."
    caption = tag("figcaption", "Tuned kernels, time before over time after", tag("small", note))
    figure = tag("figure", caption, ratio_dots(lanes, "ratios", "before"), class_="wide") if lanes else None
    found = table("Verdicts by contender and pass", columns, body, sortable=True)
    return join((tag("p", text, class_="hint"), figure, found))


def _counts(judged: Sequence[Judgement]) -> list[Cell]:
    counts = Counter(found.verdict for found in judged)
    mean = geometric_mean(found.ratio for found in judged)
    cells = [Cell(len(judged)), *(Cell(counts[name], None, None, _kind(name, counts[name])) for name in VERDICTS)]
    return [*cells, Cell(floored_ratio(mean), None if math.isnan(mean) else mean)]


def _kind(verdict: str, count: int = 1) -> str:
    return KINDS.get(verdict, "") if count else ""


def _rows(data: Comparison) -> Markup:
    columns = [Column("Problem"), Column("Graph", note="edges, nodes", choice=True)]
    columns += [Column("dtype", note="layout", choice=True), Column("Operation", choice=True)]
    columns += [Column("Pass", choice=True), Column("Before", True), Column("After", True)]
    columns += [Column("Ratio", True, "before / after"), Column("Verdict", choice=True)]
    groups = []
    for pair, judged in zip(data.pairs, data.judged, strict=True):
        ours = judged[TUNED]
        cells = [*row_cells(pair.after), _time(pair.before, TUNED), _time(pair.after, TUNED, "best")]
        groups.append(Group([*cells, _ratio(ours), _verdict(ours)], _details(pair, judged)))
    return grouped_table("Tuned kernels before and after", columns, groups) if groups else _none()


def _none() -> Markup:
    return tag("p", "None.", class_="hint")


def _time(row: SuiteRow, contender: str, kind: str = "") -> Cell:
    time_us = row.times.get(contender, math.nan)
    if math.isnan(time_us):
        return Cell("failed", None, None, "failed", row.reason(contender))
    return Cell(time_text(time_us), time_us, None, kind)


def _ratio(judged: Judgement) -> Cell:
    if math.isnan(judged.ratio):
        return Cell(MISSING)
    low, high = judged.interval
    spread = None if math.isinf(high) else f"{low:.3f} to {high:.3f}"
    return Cell(f"{judged.ratio:,.3f}×", judged.ratio, spread)


def _verdict(judged: Judgement) -> Cell:
    return Cell(judged.verdict, judged.verdict, judged.reason, _kind(judged.verdict))


def _details(pair: Pair, judged: dict[str, Judgement]) -> Markup:
    """A closed ``details`` element: every contender of both rows, changed knobs, raw samples."""
    columns = [Column("Contender"), Column("Before", True), Column("After", True)]
    columns += [Column("Ratio", True, "before / after"), Column("Verdict"), Column("Note")]
    body = [[Cell(contender_name(name)), _time(pair.before, name), _time(pair.after, name), _ratio(found),
             _verdict(found), Cell(_failures(pair, name), kind="wrap")] for name, found in judged.items()]  # fmt: skip
    row = pair.after
    what = f"{row.text('label')} on {row.graph}, {direction_name(row.which)}"
    shown = (table(f"Contenders: {what}", columns, body), _knobs(pair), _samples(pair, what))
    return tag("details", tag("summary", "contenders, schedules, raw samples"), tag("div", *shown, class_="opened"))


def _failures(pair: Pair, contender: str) -> str:
    sides = (("before", pair.before), ("after", pair.after))
    return "; ".join(f"{name}: {row.reason(contender)}" for name, row in sides
                     if math.isnan(row.times.get(contender, math.nan)))  # fmt: skip


def _knobs(pair: Pair) -> Markup:
    before, after = pair.before.schedules(TUNED), pair.after.schedules(TUNED)
    body = [
        [Cell(direction_name(direction)), Cell(name), *(Cell(value_text(knobs.get(name))) for knobs in (old, new))]
        for direction, new in after.items()
        if (old := before.get(direction)) is not None
        for name in union((old, new))
        if old.get(name) != new.get(name)
    ]
    if not body:
        return tag("p", "Both records used the same tuned schedules." if before and before == after else
                   "No knob in both records has changed.", class_="hint")  # fmt: skip
    columns = [Column("Direction"), Column("Knob"), Column("Before"), Column("After")]
    return table("Tuned schedules: knobs that changed", columns, body)


def _samples(pair: Pair, what: str) -> Markup | None:
    """The tuned kernel's samples on one axis, relative to the time before."""
    given = {"before": pair.before.samples(TUNED), "after": pair.after.samples(TUNED)}
    if not all(given.values()):
        return tag("p", "One of the records has no raw samples.", class_="hint")
    note = "Deviation from the median before; samples run from top to bottom."
    caption = tag("figcaption", "Raw samples of the tuned kernel", tag("small", note))
    return tag("figure", caption, strips(given, what, origin="before"))


def _alone(data: Comparison) -> Markup:
    shown = []
    for name, rows in (("before", data.only_before), ("after", data.only_after)):
        head = tag("h3", f"Only {name}: {rows_text(len(rows))}")
        columns = [Column("Problem"), Column("Graph", note="edges, nodes"), Column("dtype", note="layout")]
        columns += [Column("Operation"), Column("Pass"), Column("Tuned", True)]
        body = [[*row_cells(row), _time(row, TUNED)] for row in rows]
        shown += [head, table(f"Rows of the record {name} only", columns, body, sortable=True) if rows else _none()]
    return join(shown)


def _records(data: Comparison) -> Markup:
    """Facts of both records, with differences marked, because they may explain a verdict."""
    sides = [_facts(record) for record in (data.before, data.after)]
    body = []
    for name in dict.fromkeys((*sides[0], *sides[1])):
        old, new = (side.get(name, MISSING) for side in sides)
        changed = "changed" if old != new and name != "file" else ""
        body.append([Cell(name), Cell(old, kind="wrap"), Cell(new, kind=f"wrap {changed}".strip())])
    columns = [Column("What"), Column("Before"), Column("After")]
    hint = tag("p", "A dot marks differences.", class_="hint")
    return join((hint, table("Devices, dates, generators and software", columns, body)))


def _facts(record: Record) -> dict[str, str]:
    dates = [date[:16].replace("T", " ") for date in record.met("date")]
    span = MISSING if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    device = {key: str(value) for key, value in record.device.items() if key not in ("slug", "vector_bytes")}
    facts = {"file": record.path.name, **device, "rows": str(len(record.rows)), "measured": span}
    return facts | {"generator": ", ".join(record.met("generator")) or MISSING, **record.software}


def _method(data: Comparison) -> Markup:
    level, tolerance = f"{data.level:.0%}", f"{data.tolerance:.0%}"
    lines = (
        ("Pairs", "Rows are paired by problem, operation, dtype, layout, graph class, pass and deterministic mode."),  # noqa: E501
        ("Ratio", "Median of the raw samples before / median after. Above 1 the later record is faster."),
        ("Interval", f"{level} percentile bootstrap of the ratio of medians, with {RESAMPLES:,} resamples of both sides and a fixed seed. Equal records give an equal page."),  # noqa: E501
        ("Verdict", f"Faster or slower if the whole interval is more than {tolerance} from 1, same if it is within {tolerance}, else unclear. A row without a time, or with too few raw samples, is unclear; the table gives the reason. A row with one measurement that is in both records is the same."),  # noqa: E501
        ("Limits", f"The samples of a row come from one process per record. The interval does not cover differences between processes (clocks, temperature, memory placement, other load). The {tolerance} tolerance and the peers' ratios help to judge them."),  # noqa: E501
    )  # fmt: skip
    return tag("ul", *(tag("li", tag("strong", f"{title}. "), text) for title, text in lines), class_="prose")
