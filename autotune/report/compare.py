"""Compare two bench records (files or folders): pairs of rows with verdicts.

Rows pair by identity (``autotune.bench.rows.identity_of``), so the records may be of one device before and after a
change, or of two devices. A verdict uses the raw samples of both rows, not only their medians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.bench.rows import SuiteRow, identity_of, mapping
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
from autotune.report.charts import ratio_dots, strips
from autotune.report.devices import PASSES
from autotune.report.kernels import by
from autotune.report.render import Page, Section, render
from autotune.report.rows import met, plain_names, value_text
from autotune.text import MISSING, TUNED, counted, direction_name, floored_ratio, geometric_mean, is_ours
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
        slug = self.device.get("slug")
        return str(slug) if is_slug(slug) else self.path.stem

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
    """One row, as in the record before and in the record after, with a judgement of each contender of both.

    judged: the tuned kernel, then the others in the order of their times.
    """

    before: SuiteRow
    after: SuiteRow
    judged: dict[str, Judgement]

    @property
    def which(self) -> str:
        return self.before.which


@dataclass(frozen=True)
class Comparison:
    """Rows of both records, in the order of the record before; then rows of one record only. sides: their names."""

    before: Record
    after: Record
    sides: tuple[str, str]
    pairs: tuple[Pair, ...]
    only_before: tuple[SuiteRow, ...]
    only_after: tuple[SuiteRow, ...]

    @property
    def places(self) -> tuple[str, str]:
        return places_of(self.sides)

    @property
    def ours(self) -> list[Judgement]:
        """Of the tuned kernel, by pair."""
        return [pair.judged[TUNED] for pair in self.pairs]


def places_of(sides: tuple[str, str]) -> tuple[str, str]:
    """For sentences: ``after``, ``on NVIDIA H200``."""
    return sides if sides == ("before", "after") else (f"on {sides[0]}", f"on {sides[1]}")


def compare(before: Record, after: Record) -> Comparison:
    """Compare every row of both records; the sides are two devices, or before and after of one."""
    sides = ("before", "after") if before.name == after.name else (before.name, after.name)
    pairs = []
    for identity in (identity for identity in before.rows if identity in after.rows):
        row, other = before.rows[identity], after.rows[identity]
        names = dict.fromkeys((TUNED, *(name for name in other.times if name in row.times)))
        pairs.append(Pair(row, other, {name: judge(row, other, name, places_of(sides)) for name in names}))
    only = [tuple(row for identity, row in record.rows.items() if identity not in other.rows)
            for record, other in ((before, after), (after, before))]  # fmt: skip
    return Comparison(before, after, sides, tuple(pairs), *only)


def judge(before: SuiteRow, after: SuiteRow, contender: str, places: tuple[str, str]) -> Judgement:
    rows = dict(zip(places, (before, after), strict=True))
    ratio = before.times.get(contender, math.nan) / after.times.get(contender, math.nan)
    samples = {place: row.samples(contender) for place, row in rows.items()}
    for lacking, what in (
        ([place for place, row in rows.items() if math.isnan(row.times.get(contender, math.nan))], "time"),
        ([place for place in rows if not samples[place]], "raw samples"),
    ):
        if lacking:
            return Judgement(ratio, (0.0, math.inf), UNCLEAR, f"no {what} {' and '.join(lacking)}")
    theirs, ours = samples.values()
    if theirs == ours:
        # A record continued from an older one keeps its rows: nothing was measured twice.
        return Judgement(1.0, (1.0, 1.0), SAME, ONE_MEASUREMENT)
    interval = ratio_interval(ours, theirs)
    reason = "too few samples" if math.isinf(interval[1]) else None
    return Judgement(ratio, interval, verdict(interval), reason)


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
    by_identity: dict[tuple[Any, ...], SuiteRow] = {}
    for index, row in enumerate(rows):
        try:
            by_identity[identity_of(row)] = SuiteRow(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ReportError(
                f"{file}: row {index} does not say what it is about ({error!r}); write it anew with equitune bench"
            ) from error
    return Record(file, mapping(data.get("device")), by_identity)


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


# The page that compares two records: a Comparison as HTML.

SECTIONS = [
    Section("verdicts", "Verdicts", "compare_verdicts.html"),
    Section("rows", "Rows in both records", "compare_rows.html"),
    Section("alone", "Rows in one record only", "compare_alone.html"),
    Section("records", "The two records", "compare_records.html"),
    Section("method", "How verdicts are made", "compare_method.html"),
]


def build_comparison(data: Comparison) -> Page:
    """The whole page. Equal records give equal text."""
    before, after = data.before, data.after
    lanes = {
        direction_name(which): ratios
        for which, pairs in by(data.pairs, "which", PASSES).items()
        if (ratios := [pair.judged[TUNED].ratio for pair in pairs if not math.isnan(pair.judged[TUNED].ratio)])
    }
    return render(
        "compare.html",
        f"compare-{'-'.join(dict.fromkeys((before.slug, after.slug)))}",
        {},
        data=data,
        sections=SECTIONS,
        title=before.name if before.name == after.name else f"{before.name} and {after.name}",
        sentence=sentence(data),
        verdict_names=VERDICTS,
        verdicts=list(_verdicts(data)),
        kinds={FASTER: "faster", SLOWER: "slow"},
        heads=[side[:1].upper() + side[1:] for side in data.sides],
        dots=ratio_dots(lanes, "ratios", data.sides[0].replace("$", r"\$")) if lanes else None,
        lines=[_line(pair, data.sides) for pair in data.pairs],
        facts=_facts(before, after),
        level=LEVEL,
        tolerance=TOLERANCE,
        resamples=RESAMPLES,
    )


def sentence(data: Comparison) -> str:
    """The result in plain words."""
    if not data.pairs:
        return "The two records have no row in common."
    counts = Counter(judged.verdict for judged in data.ours)
    told = ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
    mean = geometric_mean(judged.ratio for judged in data.ours)
    end = "" if math.isnan(mean) else f" Geometric mean speed-up of the tuned kernels: {floored_ratio(mean)}."
    kept = sum(judged.reason == ONE_MEASUREMENT for judged in data.ours)
    end += f" {counted(kept, 'row')} are in both records but were measured once." if kept else ""
    rows = counted(len(data.pairs), "row")
    return f"Of {rows} in both records, {data.sides[1]} against {data.sides[0]}: {told}.{end}"


def verdict_lines(data: Comparison) -> Iterator[str]:
    """The result for a terminal: in plain words, then our kernels by pass, and the peers, which are the control."""
    yield sentence(data)
    found = list(_verdicts(data))
    passes = [(direction_name(which), judged) for name, which, judged in found if name == TUNED]
    peers = [judgement for name, _, judged in found if not is_ours(name) for judgement in judged]
    for name, judged in [*passes, *([("peers, as a control", peers)] if peers else [])]:
        counts = Counter(judgement.verdict for judgement in judged)
        told = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
        mean = geometric_mean(judgement.ratio for judgement in judged)
        yield f"  {name}: {told}" + ("" if math.isnan(mean) else f"; mean ratio {floored_ratio(mean)}")


def _verdicts(data: Comparison) -> Iterator[tuple[str, str, list[Judgement]]]:
    """By contender and pass: our kernels, and the peers, which show changes of the machine."""
    for name in dict.fromkeys(name for pair in data.pairs for name in pair.judged):
        for which, pairs in by(data.pairs, "which", PASSES).items():
            if judged := [pair.judged[name] for pair in pairs if name in pair.judged]:
                yield name, which, judged


def _line(pair: Pair, sides: tuple[str, str]) -> dict[str, Any]:
    """A row of both records with what opens below it. changes: (direction, knob, before, after), said: why none.

    failures: by contender, why it has no time.
    """
    rows = dict(zip(sides, (pair.before, pair.after), strict=True))
    before, after = (row.schedules(TUNED) for row in rows.values())
    changes = [
        (direction, name, value_text(old.get(name)), value_text(new.get(name)))
        for direction, new in after.items()
        if (old := before.get(direction)) is not None
        for name in plain_names((old, new))
        if old.get(name) != new.get(name)
    ]
    said = "Both records used the same tuned schedules." if before and before == after else ""
    failures = {
        name: "; ".join(f"{side}: {row.reason(name)}" for side, row in rows.items()
                        if math.isnan(row.times.get(name, math.nan)))
        for name in pair.judged
    }  # fmt: skip
    samples = {side: row.samples(TUNED) for side, row in rows.items()}
    return {
        "pair": pair,
        "changes": changes,
        "said": said or "No knob in both records has changed.",
        "failures": failures,
        "strips": strips(samples, pair.after.what, origin=sides[0]) if all(samples.values()) else None,
    }


def _facts(before: Record, after: Record) -> list[tuple[str, str, str]]:
    """(name, before, after) of what may explain a verdict."""
    sides = [_facts_of(record) for record in (before, after)]
    return [(name, sides[0].get(name, MISSING), sides[1].get(name, MISSING)) for name in sides[0] | sides[1]]


def _facts_of(record: Record) -> dict[str, str]:
    dates = [date[:16].replace("T", " ") for date in met(record.rows.values(), "date")]
    span = MISSING if not dates else dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    device = {key: str(value) for key, value in record.device.items() if key not in ("slug", "vector_bytes")}
    facts = {"file": record.path.name, **device, "rows": str(len(record.rows)), "measured": span}
    return facts | {"generator": ", ".join(met(record.rows.values(), "generator")) or MISSING, **record.software}
