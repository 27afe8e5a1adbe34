"""The whole replay of untuned schedules: cross-validation, its record, and the table that the runtime loads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.bench.rows import Row, SuiteRow, stored_rows
from autotune.database.entry import Entry
from autotune.database.lookup import find_schedule
from autotune.database.model_of_time import FEATURES, FORM, Features, Trees, knobs_of, table_path
from autotune.database.nearest import Query, why_illegal, within_limits
from autotune.database.predicted import TRIED, edges_for_rules, expected_group, plan_of, shortlist
from autotune.database.store import database_path, load_table, replace_file
from autotune.database.trials import SUFFIX
from autotune.errors import ConfigError
from autotune.measure.space import search_space
from autotune.replay import fit
from autotune.search.starting_points import starting_points
from kernelgen.device import CUDA_ARCHS, DeviceFacts, representative
from kernelgen.kernels.product.plan import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec
from kernelgen.problem.product import shape_of

# The folder of results with searches of problems that were drawn at random. They teach the model; the runtime does not
# load their entries.
DRAWN = "drawn"


def read(archive: Path, results: Path) -> tuple[dict[str, Any], DeviceFacts, list[Entry], list[fit.Trials]]:
    """A device's record, facts, entries of the model's kinds on graphs that are not skewed, and their studies.

    Those of ``DRAWN`` come last. Compared choices are among the trials. archive:
    ``results/trials/DEVICE.jsonl.gz``, or the folder beside it.
    """
    slug = archive.name.removesuffix(SUFFIX)
    table = load_table(database_path(results, slug))
    if not table.by_identity:
        raise ConfigError(f"{database_path(results, slug)} has no entries; expected the database of {archive}")
    device = {key: value for key, value in table.device.items() if key != "driver"}
    facts, entries, found = fit.facts_of(device), list[Entry](), list[fit.Trials]()
    for folder, trials in ((results, archive.with_name(slug)), (results / DRAWN, results / DRAWN / "trials" / slug)):
        known = load_table(database_path(folder, slug)).by_identity.values()
        served = (entry for entry in known if fit.spec_of(entry, facts) is not None)
        here = [entry for entry in served if not entry.parsed_graph_class.waits_for_longest(facts)]
        entries += here
        found += fit.read_studies(trials, here, facts)
    compared = fit.read_comparisons(fit.comparisons_path(results, slug)).values()
    studies = [fit.with_compared(study, compared) for study in found]
    if len({study.shape for study in studies}) < 2:
        raise ConfigError(f"{archive} has no trials of two problems that {database_path(results, slug)} cites")
    return device, facts, entries, studies


def replay_defaults(archive: Path, results: Path, note: Callable[[str], None]) -> tuple[dict[str, Any], Path, Path]:
    """Cross-validate, fit to all trials, and write both; returns the record and the two paths."""
    device, facts, entries, studies = read(archive, results)
    trials = sum(len(study.times_us) for study in studies)
    note(f"{trials:,} trials of {len(studies)} studies")
    estimator = Estimator(studies)
    held = hold_out_each(studies, entries, note)
    costs = costs_of(held, estimator)
    found, (of_archive, of_drawn) = table_of(held, costs), digests(archive, results)
    record = {
        "record": "defaults",
        "device": device["slug"],
        "archive": of_archive,
        "drawn": of_drawn,
        "trials": trials,
        "studies": len(studies),
        "problems": len({study.shape for study in studies}),
        "chosen": fit.CHOSEN,
        "compared": sum(cost[fit.CHOSEN].compared for cost in costs),
        "estimate_log_error": round(estimator.error, 4),
        "choices": found,
        "rows": rows_of(held, costs),
        "starts": starts_of(held, entries, estimator),
        "transfer": transfers(held, estimator),
    }
    bench = list(stored_rows(results, facts))
    record["suite"] = against_peers(bench, record["rows"])
    record["suite_first_run"] = against_peers(bench, record["rows"], BY_FIRST_RUN)
    trees = fit.fit_studies(studies)
    table = table_data(device, entries, studies, trees, expected_of(found), record["transfer"])
    path = record_path(results, device["slug"])
    return record, _write(path, record), _write(table_path(results, device["slug"]), table)


def expected_of(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What the runtime's choice costs by the cross-validation, by size. choices: of the record."""
    tried, first = (choices[name]["by size"] for name in (fit.ANY_TRIAL, fit.FIRST_RUN))
    return {
        size: {
            **{key: found[key] for key in ("mean", "worst", "measured")},
            "tried": tried[size]["mean"],
            "first_mean": first[size]["mean"],
            "first_worst": first[size]["worst"],
        }
        for size, found in choices[fit.CHOSEN]["by size"].items()
    }


def table_data(
    device: Mapping[str, Any],
    entries: Sequence[Entry],
    studies: Sequence[fit.Trials],
    trees: Trees,
    expected: Mapping[str, Mapping[str, float]],
    transfer: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The runtime's table as JSON data. expected: see :func:`expected_of`; transfer: to other GPUs."""
    winners: dict[str, list[dict[str, Any]]] = {}
    classes: dict[str, set[str]] = {}
    for entry in entries:
        won = fit.winner_of(entry)
        if won is None:
            continue
        line = {"schedule": knobs_of(won.schedule), "layout": won.layout, "small": won.small}
        lines = winners.setdefault(f"{entry.operation} {entry.direction}", [])
        if line not in lines:
            lines.append(line)
    for study in studies:
        classes.setdefault(study.entry.operation, set()).add(study.entry.graph_class)
    return {
        "form": FORM,
        "device": dict(device),
        "trials": sum(len(study.times_us) for study in studies),
        "problems": len({study.shape for study in studies}),
        "expected": {size: dict(found) for size, found in expected.items()},
        "transfer": {arch: dict(found) for arch, found in transfer.items()},
        "classes": {operation: sorted(texts) for operation, texts in sorted(classes.items())},
        "names": list(FEATURES),
        "winners": dict(sorted(winners.items())),
        "trees": trees.to_dict(),
    }


def record_path(results: Path, slug: str) -> Path:
    """The record of a device's cross-validation."""
    return results / "replay" / f"defaults-{slug}.json"


def digests(archive: Path, results: Path) -> tuple[str, str]:
    """Of which trials a record speaks: first digits of the SHA-256 of the archive and of that of ``DRAWN``, if any."""
    return _digest(archive), _digest(results / DRAWN / "trials" / archive.name)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""


def _write(path: Path, data: Mapping[str, Any]) -> Path:
    """One line for each value of the outermost object."""
    lines = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'), allow_nan=False)}" for k, v in data.items())
    replace_file(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


# Leave-one-problem-out: what schedules that are chosen without a problem's trials cost on that problem.
#
# A chosen schedule's cost is known if it was compared with the tuned schedule, or if the held-out
# study happens to have tried it. Otherwise it is an estimate, of a model that was fitted to all trials, the held-out
# ones among them; its error on trials that it has not seen is reported.

ESTIMATE = fit.Settings(trees=400, depth=7, rate=0.1, ridge=1.0, share=0.5)
FOLDS = 5
# A choice is good if it takes at most this many times the tuned time, by the worst.
GOOD = 1.35
STARTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Cost:
    """``ratio``: time over the tuned time. measured: of a trial or a comparison, not an estimate.

    compared: measured in turn with the tuned schedule, in one process.
    """

    ratio: float
    measured: bool
    compared: bool = False


class Estimator:
    """Times of schedules of recorded studies, measured where they can be: by a comparison, or else by a trial."""

    def __init__(self, studies: Sequence[fit.Trials]) -> None:
        self._trees = fit.fit_studies(studies, ESTIMATE, seeds=1)
        self.error = _error(studies)

    def cost(self, study: fit.Trials, schedule: CudaSchedule) -> Cost:
        time_us = study.times_us.get(schedule)
        if time_us is not None:
            return Cost(time_us / study.tuned_us, True, schedule in study.compared)
        row = Features(study.spec, study.graph_class).of(study.plan(schedule))
        return Cost(max(1.0, math.exp(float(self._trees.predict([row])[0]))), False)


def _error(studies: Sequence[fit.Trials]) -> float:
    """Root mean square of the logarithms' errors on a fifth of every study, left out in turn; of what takes < 1.5."""
    errors: list[float] = []
    for fold in range(FOLDS):
        kept = [_part(study, fold, keep=True) for study in studies]
        trees = fit.fit_studies([study for study in kept if study.times_us], ESTIMATE, seeds=1)
        for study in studies:
            out = _part(study, fold, keep=False)
            if out.times_us:
                slow = out.slowdowns()
                near = slow < math.log(1.5)
                errors += (trees.predict(out.rows) - slow)[near].tolist()
    return float(np.sqrt(np.mean(np.square(errors))))


def _part(study: fit.Trials, fold: int, keep: bool) -> fit.Trials:
    places = [place for place in range(len(study.times_us)) if (place % FOLDS != fold) == keep]
    times = list(study.times_us.items())
    return dataclasses.replace(study, times_us=dict(times[place] for place in places), rows=study.rows[places])


def hold_out_each(
    studies: Sequence[fit.Trials], entries: Sequence[Entry], note: Callable[[str], None] = lambda text: None
) -> list[fit.Held]:
    """Every study, seen by a model that was fitted without the problem and its likes (``shape_of``)."""
    held = []
    for shape in dict.fromkeys(study.shape for study in studies):
        left = [study for study in studies if study.shape == shape]
        note(f"without {left[0].entry.label}")
        trees: Trees = fit.fit_studies([study for study in studies if study.shape != shape])
        held += [fit.hold_out(study, entries, trees) for study in left]
    return held


def costs_of(held: Iterable[fit.Held], estimator: Estimator) -> list[dict[str, Cost]]:
    """The cost of every choice, by study; a choice that is none is left out."""
    return [
        {
            name: estimator.cost(one.study, schedule)
            for name, choose in fit.CHOICES.items()
            if (schedule := choose(one)) is not None
        }
        | {
            fit.FIRST_RUN: _least(estimator, one, shortlist(one.order, one.pool[0], TRIED)),
            "best of the pool": _least(estimator, one, one.pool),
        }
        for one in held
    ]


def _least(estimator: Estimator, one: fit.Held, schedules: Iterable[CudaSchedule]) -> Cost:
    return min((estimator.cost(one.study, schedule) for schedule in schedules), key=lambda cost: cost.ratio)


def summary(costs: Sequence[Cost]) -> dict[str, float | int]:
    """Mean and worst ratio, and the same of measured ones alone."""
    ratios = [cost.ratio for cost in costs]
    known = [cost.ratio for cost in costs if cost.measured]
    found: dict[str, float | int] = {
        "studies": len(ratios),
        "mean": round(statistics.fmean(ratios), 4),
        "worst": round(max(ratios), 4),
        "beyond": sum(ratio > GOOD for ratio in ratios),
        "measured": round(len(known) / len(ratios), 4),
    }
    if known:
        found |= {"measured_mean": round(statistics.fmean(known), 4), "measured_worst": round(max(known), 4)}
    return found


GROUPS: Mapping[str, Callable[[fit.Trials], str]] = {
    "by direction": lambda study: f"{study.entry.operation} {study.entry.direction}",
    "by graph class": lambda study: study.entry.graph_class,
    "by problem": lambda study: study.entry.label,
    "by size": lambda study: expected_group(study.entry.operation, study.graph_class),
}


def table_of(held: Sequence[fit.Held], costs: Sequence[Mapping[str, Cost]]) -> dict[str, dict[str, Any]]:
    """By choice: its summary over all studies, and over the studies of each group."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for cost in costs for name in cost):
        of = [(one.study, cost[name]) for one, cost in zip(held, costs, strict=True) if name in cost]
        found[name] = dict(summary([cost for _, cost in of]))
        for group, key in GROUPS.items():
            kinds = sorted({key(study) for study, _ in of})
            found[name][group] = {kind: summary([cost for study, cost in of if key(study) == kind]) for kind in kinds}
    return found


def rows_of(held: Sequence[fit.Held], costs: Sequence[Mapping[str, Cost]]) -> list[list[Any]]:
    """By study: its name (``name_of``), cost by rules, by the model, if measured, the model's choice (``knobs_of``),
    cost of what a first run keeps."""
    rows = []
    for one, cost in zip(held, costs, strict=True):
        found, choice = cost[fit.CHOSEN], fit.CHOICES[fit.CHOSEN](one)
        assert choice is not None
        by_rules = round(cost["rules"].ratio, 4)
        kept = round(cost[fit.FIRST_RUN].ratio, 4)
        rows.append(
            [*fit.name_of(one.study.entry), by_rules, round(found.ratio, 4), found.measured, knobs_of(choice), kept]
        )
    return rows


def starts_of(held: Sequence[fit.Held], entries: Sequence[Entry], estimator: Estimator) -> dict[str, dict[str, float]]:
    """Of orders in which a search could try the pool: mean cost of the best of the first 1, 2, 4 and 8 schedules."""
    orders: dict[str, list[Sequence[CudaSchedule]]]
    orders = {"by kinship": [_by_kinship(one, entries) for one in held], "by the model": [one.order for one in held]}
    found: dict[str, dict[str, float]] = {}
    for name, lists in orders.items():
        both = list(zip(held, lists, strict=True))
        for count in STARTS:
            best = [_least(estimator, one, order[:count]).ratio for one, order in both]
            found.setdefault(name, {})[str(count)] = round(statistics.fmean(best), 4)
    return found


def _by_kinship(one: fit.Held, entries: Sequence[Entry]) -> list[CudaSchedule]:
    """The default and the starting points of a search that knows no model of time."""
    entry, spec = one.study.entry, one.study.spec
    kernel = (spec.problem, entry.operation, entry.direction, entry.dtype, spec.facts, entry.layout)
    space = search_space(*kernel, num_edges=2**one.study.graph_class.log2_edges)
    others = [other for other in entries if shape_of(other.problem) != one.study.shape]
    starts = (space.default, *starting_points(space, one.study.graph_class, others, by_time=False))
    return [schedule for schedule in starts if isinstance(schedule, CudaSchedule)]


# What the schedules of a device's database may cost on another GPU: an estimate from its own trials, by limits alone.
#
# For each study the schedule that the other GPU would get is compared with the fastest trial that is legal there, both
# at the times of the device that was measured. So this counts what smaller limits (shared memory, threads, L2) take
# away. Another balance of bandwidth, caches and arithmetic it does not see: the true cost is at least as likely higher.


def transfers(held: Sequence[fit.Held], estimator: Estimator) -> dict[str, dict[str, float]]:
    """By architecture other than the record's: mean and worst over the fastest trial that is legal there.

    tuned: of an entry's own problem, in its form for that GPU. untuned: of the model's first legal choice for a problem
    that is held out. changed: share of entries that take another form there.
    """
    here = held[0].study.spec.facts
    return {arch: _transfer(held, estimator, representative(arch)) for arch in CUDA_ARCHS if arch != here.arch}


def _transfer(held: Sequence[fit.Held], estimator: Estimator, there: DeviceFacts) -> dict[str, float]:
    tuned: list[float] = []
    untuned: list[float] = []
    changed = 0
    for one in held:
        study, spec = one.study, dataclasses.replace(one.study.spec, facts=there)
        known = [time for schedule, time in study.times_us.items() if plan_of(spec, schedule) is not None]
        if not known:
            continue
        best = min(known) / study.tuned_us
        served = served_there(study, spec)
        changed += served != study.entry.tuned_schedule
        chosen = next((schedule for schedule in one.order if plan_of(spec, schedule) is not None), served)
        for costs, schedule in ((tuned, served), (untuned, chosen)):
            plan = plan_of(study.spec, schedule)
            if plan is not None and isinstance(plan.spec.schedule, CudaSchedule):
                costs.append(estimator.cost(study, plan.spec.schedule).ratio / best)
    found = {"changed": changed / max(1, len(tuned))}
    for name, costs in (("tuned", tuned), ("untuned", untuned)):
        found |= {name: statistics.fmean(costs), f"{name} worst": max(costs)}
    return {name: round(value, 4) for name, value in found.items()}


def served_there(study: fit.Trials, spec: Spec) -> CudaSchedule:
    """An entry's schedule in its form for another GPU (``spec.facts``); the default where it has none."""
    query = Query(spec, find_schedule, study.graph_class)
    entry, _ = within_limits(query, study.entry, study.spec.facts)
    schedule = entry.tuned_schedule
    if why_illegal(query, schedule):
        schedule = default_schedule(spec, edges_for_rules(spec.facts, study.graph_class))
    assert isinstance(schedule, CudaSchedule)
    return schedule


# A row is lost if the fastest peer takes less than this many times our time.
LOST = 0.95


# Where a row of the record has the cost of the model's choice, and of what a first run keeps.
BY_MODEL, BY_FIRST_RUN = 7, 10


def against_peers(bench: Iterable[Row], choices: Sequence[Sequence[Any]], cost: int = BY_MODEL) -> dict[str, Any]:
    """Single passes of the suite with an untuned choice: how many, how many lost, and the least ratio with its row.

    A ratio is the fastest peer's time over our tuned time, divided by the choice's cost. choices: of the record's
    ``rows``; cost: the place of the cost that counts. Passes of several kernels, deterministic rows, and those without
    a study or a peer are left out.
    """
    costs = {tuple(choice[:6]): float(choice[cost]) for choice in choices}
    found = []
    for row in bench:
        name = tuple(row[key] for key in ("label", "operation", "pass", "dtype", "layout", "graph_class"))
        ratio = SuiteRow(row).ratio
        if name in costs and ratio > 0 and not row.get("deterministic", False):
            found.append((ratio / costs[name], name))
    if not found:
        return {"rows": 0, "lost": 0}
    least, name = min(found)
    lost = sum(ratio < LOST for ratio, _ in found)
    return {"rows": len(found), "lost": lost, "least": round(least, 4), "least row": list(name)}


def costs_table(record: Mapping[str, Any]) -> Any:
    """Times over the tuned time, by way to choose: of all studies, and by size of graph."""
    from rich.table import Table

    sizes = list(record["choices"][record["chosen"]]["by size"])
    title = f"{record['device']}: time over the tuned time, {record['problems']} problems held out in turn"
    note = f"* what the runtime does; {record['studies']} studies; "
    note += f"estimates of unmeasured choices are off by {record['estimate_log_error']:.0%}"
    starts = record["starts"]
    for name, found in starts.items():
        note += f"; best of the first 2 in the order {name} {found['2']:.3f}"
    suite, kept = record["suite"], record["suite_first_run"]
    note += f"; {suite['lost']} of {suite['rows']} single passes of the suite below 0.95 of the fastest peer"
    note += f", {kept['lost']} after a first run, which tries {TRIED} schedules"
    table = Table(title=title, caption=note)
    table.add_column("choice", no_wrap=True)
    for column in ("mean", "worst", "beyond 1.35", "measured", *(f"{size}, mean" for size in sizes)):
        table.add_column(column, justify="right")
    for name, found in record["choices"].items():
        cells = [f"{found['mean']:.3f}", f"{found['worst']:.2f}", str(found["beyond"]), f"{found['measured']:.0%}"]
        cells += [f"{found['by size'][size]['mean']:.3f}" for size in sizes]
        table.add_row(f"{name} *" if name == record["chosen"] else name, *cells)
    return table


def measured_line(found: Mapping[str, Any], compared: int) -> str:
    """How many choices are measured and what those and all of them take. found: see :func:`summary`."""
    count, measured = found["studies"], round(found["measured"] * found["studies"])
    text = f"{measured} of {count} choices are measured, {compared} of them beside the tuned schedule"
    if measured:
        text += f": mean {found['measured_mean']:.3f}, worst {found['measured_worst']:.2f}"
    if count > measured:
        text += f"; with {count - measured} estimates mean {found['mean']:.3f}, worst {found['worst']:.2f}"
    return text
