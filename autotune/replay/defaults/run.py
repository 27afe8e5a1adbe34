"""The whole replay of untuned schedules: cross-validation, its record, and the table that the runtime loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.bench.rows import stored_rows
from autotune.database.entry import Entry
from autotune.database.model_of_time import FEATURES, FORM, Trees, knobs_of, table_path
from autotune.database.store import database_path, load_table, replace_file
from autotune.database.trials import SUFFIX
from autotune.errors import ConfigError
from autotune.replay.defaults.choices import CHOSEN, FIRST_RUN, TRIED, Held, winner_of
from autotune.replay.defaults.comparisons import comparisons_path, read_comparisons, with_compared
from autotune.replay.defaults.evaluate import Estimator, costs_of, hold_out_each, rows_of, starts_of, table_of
from autotune.replay.defaults.fit import fit_studies
from autotune.replay.defaults.peers import BY_FIRST_RUN, against_peers
from autotune.replay.defaults.studies import Trials, facts_of, read_studies, spec_of
from autotune.replay.defaults.transfer import transfers
from autotune.search.spaces.tensor_product import search_space
from autotune.search.starting_points import starting_points
from kernelgen.device import DeviceFacts
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.problem.sizes import shape_of

# The folder of results with searches of problems that were drawn at random. They teach the model; the runtime does not
# load their entries.
DRAWN = "drawn"


def read(archive: Path, results: Path) -> tuple[dict[str, Any], DeviceFacts, list[Entry], list[Trials]]:
    """A device's record, facts, entries of the model's kinds on graphs that are not skewed, and their studies.

    Those of ``DRAWN`` come last. Compared choices are among the trials. archive:
    ``results/trials/DEVICE.jsonl.gz``, or the folder beside it.
    """
    slug = archive.name.removesuffix(SUFFIX)
    table = load_table(database_path(results, slug))
    if not table.by_identity:
        raise ConfigError(f"{database_path(results, slug)} has no entries; expected the database of {archive}")
    device = {key: value for key, value in table.device.items() if key != "driver"}
    facts, entries, found = facts_of(device), list[Entry](), list[Trials]()
    for folder, trials in ((results, archive.with_name(slug)), (results / DRAWN, results / DRAWN / "trials" / slug)):
        known = load_table(database_path(folder, slug)).by_identity.values()
        served = (entry for entry in known if spec_of(entry, facts) is not None)
        here = [entry for entry in served if not entry.parsed_graph_class.waits_for_longest(facts)]
        entries += here
        found += read_studies(trials, here, facts)
    compared = read_comparisons(comparisons_path(results, slug)).values()
    studies = [with_compared(study, compared) for study in found]
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
        "chosen": CHOSEN,
        "compared": sum(cost[CHOSEN].compared for cost in costs),
        "estimate_log_error": round(estimator.error, 4),
        "choices": found,
        "rows": rows_of(held, costs),
        "starts": starts_of(held, _orders(held, entries), estimator),
        "transfer": transfers(held, estimator),
    }
    bench = list(stored_rows(results, facts))
    record["suite"] = against_peers(bench, record["rows"])
    record["suite_first_run"] = against_peers(bench, record["rows"], BY_FIRST_RUN)
    trees = fit_studies(studies)
    table = table_data(device, entries, studies, trees, expected_of(found), record["transfer"])
    path = record_path(results, device["slug"])
    return record, _write(path, record), _write(table_path(results, device["slug"]), table)


def _orders(held: Sequence[Held], entries: Sequence[Entry]) -> dict[str, list[list[CudaSchedule]]]:
    """The starting points of a search as they were, by kinship, and by the model; each behind nothing else."""
    by_kinship: list[list[CudaSchedule]] = []
    for one in held:
        entry, spec = one.study.entry, one.study.spec
        kernel = (spec.problem, entry.operation, entry.direction, entry.dtype, spec.facts, entry.layout)
        space = search_space(*kernel, num_edges=2**one.study.graph_class.log2_edges)
        others = [other for other in entries if shape_of(other.problem) != one.study.shape]
        starts = (space.default, *starting_points(space, one.study.graph_class, others, by_time=False))
        by_kinship.append([schedule for schedule in starts if isinstance(schedule, CudaSchedule)])
    return {
        "by kinship": by_kinship,
        "by the model": [list(one.order) for one in held],
    }


def expected_of(choices: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What the runtime's choice costs by the cross-validation, by size. choices: of the record."""
    tried, first = (choices[name]["by size"] for name in (TRIED, FIRST_RUN))
    return {
        size: {
            **{key: found[key] for key in ("mean", "worst", "measured")},
            "tried": tried[size]["mean"],
            "first_mean": first[size]["mean"],
            "first_worst": first[size]["worst"],
        }
        for size, found in choices[CHOSEN]["by size"].items()
    }


def table_data(
    device: Mapping[str, Any],
    entries: Sequence[Entry],
    studies: Sequence[Trials],
    trees: Trees,
    expected: Mapping[str, Mapping[str, float]],
    transfer: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The runtime's table as JSON data. expected: see :func:`expected_of`; transfer: see ``transfer``."""
    winners: dict[str, list[dict[str, Any]]] = {}
    classes: dict[str, set[str]] = {}
    for entry in entries:
        won = winner_of(entry)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'), allow_nan=False)}" for k, v in data.items())
    replace_file(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path
