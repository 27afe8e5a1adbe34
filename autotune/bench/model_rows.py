"""Rows of whole models: ``results/models/DEVICE.json``, one row per model, structure, pass and dtype.

A contender's cell is a figure or ``{"error": reason}``, with the date, device, driver and host of its measurement, and
the versions of a peer. A newer row replaces the one with its identity, and the file is replaced whole. Cells of ours
name the code and the tuned schedules that ran (``code``), and are measured again once these have changed; the row names
the generator and database of its latest cell.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.bench.contenders import STOCK, shares_text
from autotune.bench.rows import DEFAULT, OURS
from autotune.database.maintenance import (
    driver_version,
    hash_of_text,
    now_text,
    software_versions,
    statements_of,
)
from autotune.database.store import database_path, device_record, replace_file, tuned_dirs
from autotune.errors import DatabaseError
from autotune.measure.timing import range_text
from autotune.models.package import Package
from autotune.models.whole_model import published_models
from autotune.text import CAPTURED, JOINT, is_ours, path_and_form, significant, time_text
from kernelgen.device import DeviceFacts
from kernelgen.files import parse_json
from kernelgen.version import GENERATOR_VERSION

FORMAT = 1
IDENTITY = ("model", "structure", "pass", "dtype")
Row = dict[str, Any]
# Folders, beside ``autotune``, of the Python that an accelerated model runs.
_RUN = ("../kernelgen", "database", "models", "modules")
# By package the distributions that its models run, fast paths included; others may be installed beside them.
_OF_PACKAGE = {
    "mace": ("mace-torch", "symmetrix-xl"),
    "nequip": ("nequip",),
    "allegro": ("nequip", "nequip-allegro"),
    "sevennet": ("sevenn", "flashTP"),
}
# By what a contender's name contains the distributions of its peer.
_OF_PEER = {
    "cuequivariance": ("cuequivariance", "cuequivariance-torch", "cuequivariance-ops-torch-cu13"),
    "openequivariance": ("openequivariance",),
    "flashtp": ("flashTP",),
    "triton": ("triton",),
    "symmetrix": ("symmetrix-xl",),
}
# A figure of fewer samples says so.
ENOUGH = 10
# Cells that were measured further apart are of several runs.
RUN_HOURS = 3
_PACKAGES = {name for names in _OF_PACKAGE.values() for name in names}
# Distributions of all besides those of other records.
_DISTRIBUTIONS = (*sorted(_PACKAGES), "cuequivariance-ops-torch-cu13", "cuequivariance-ops-torch-cu12")


def identity_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in IDENTITY)


def rows_path(folder: Path, slug: str) -> Path:
    return folder / "models" / f"{slug}.json"


def stored_rows(folder: Path, slug: str) -> dict[tuple[str, ...], Row]:
    """The device's rows by identity. DatabaseError if the file is damaged: its figures would be lost."""
    path = rows_path(folder, slug)
    if not path.exists():
        return {}
    try:
        data = parse_json(path.read_bytes())
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}")
        return {identity_of(row): row for row in data["rows"] if row["contenders"] is not None}
    except (ValueError, KeyError, TypeError) as error:
        raise DatabaseError(f"{path} is no record of model rows ({error}); expected one, so move it away") from error


def store_rows(folder: Path, facts: DeviceFacts, rows: Iterable[Row]) -> Path:
    """Merge rows into the device's file."""
    path = rows_path(folder, facts.slug)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = stored_rows(folder, facts.slug) | {identity_of(row): row for row in rows}
    ordered = [merged[identity] for identity in sorted(merged)]
    device = json.dumps(device_record(facts, driver_version(facts)), ensure_ascii=False)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in ordered)
    replace_file(path, f'{{"format": {FORMAT}, "device": {device}, "rows": [\n{lines}\n]}}\n')
    return path


def what_a_row_depends_on(model: str, package: Package, facts: DeviceFacts) -> dict[str, Any]:
    """Fields that must be equal for a stored row to be kept: weights, hyperparameters, software."""
    published = published_models().get(model)
    origin: dict[str, Any] = {"weights": "the model's own"}
    if published is not None:
        origin = {"weights": "random", "parameters": published.parameters, "source": published.source}
    elif Path(model).is_file():
        origin["sha256"] = hashlib.sha256(Path(model).read_bytes()).hexdigest()
    return {
        "package": package.name,
        **json.loads(json.dumps(origin)),
        "software": software_versions(facts, _DISTRIBUTIONS),
    }


def was_measured_alike(row: Row, depends: Mapping[str, Any]) -> bool:
    """Whether a stored row has the weights, hyperparameters and software of :func:`what_a_row_depends_on`.

    Packages that its models do not run do not count, installed or not.
    """
    others = _PACKAGES.difference(_OF_PACKAGE.get(depends["package"], _PACKAGES))

    def used(fields: Mapping[str, Any]) -> dict[str, Any]:
        software = fields.get("software", {})
        return {name: version for name, version in software.items() if name not in others}

    same = all(row.get(key) == value for key, value in depends.items() if key != "software")
    return same and used(row) == used(depends)


def what_ours_depend_on(facts: DeviceFacts) -> dict[str, str]:
    """Fields of what only Equitune's own contenders run, besides its code: generator and tuned schedules."""
    return {"generator": GENERATOR_VERSION, "database": _database_hash(facts.slug)}


def is_current(contender: str, cell: Mapping[str, Any], facts: DeviceFacts) -> bool:
    """Whether a contender's cell was measured with what is here; contenders that are not ours do not run it."""
    return not is_ours(contender) or cell.get("code") == _ours_now(facts)


def signed(contender: str, cell: Mapping[str, Any], facts: DeviceFacts) -> dict[str, Any]:
    """The cell with what gave it: when and where it ran; the hash of our code, or a peer's versions."""
    origin = {"date": now_text(), "device": facts.name, "host": host_now()}
    origin |= {"driver": driver} if (driver := driver_version(facts)) else {}
    of_peers = {name for word, names in _OF_PEER.items() if word in contender for name in names}
    versions = {name: found for name in sorted(of_peers) if (found := _installed(name))}
    code = {"code": _ours_now(facts)} if is_ours(contender) else {}
    return {**cell, **origin, **({"versions": versions} if versions else {}), **code}


@functools.cache
def host_now() -> str:
    """A hash that tells this host, until it starts anew, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return hash_of_text(platform.node() + (boot.read_text(encoding="ascii") if boot.is_file() else ""))


@functools.cache
def _installed(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def is_of_one_run(row: Mapping[str, Any]) -> bool:
    """Whether all cells of a row say that they were measured on one host, within :data:`RUN_HOURS`."""
    cells = row["contenders"].values()
    try:
        hosts = {cell["host"] for cell in cells}
        dates = [datetime.fromisoformat(cell["date"]) for cell in cells]
        return len(hosts) == 1 and max(dates) - min(dates) <= timedelta(hours=RUN_HOURS)
    except (KeyError, TypeError, ValueError):
        return False


def _ours_now(facts: DeviceFacts) -> str:
    return hash_of_text(" ".join((own_code(), *what_ours_depend_on(facts).values())))


@functools.cache
def own_code() -> str:
    """Hash of the Python that accelerated models run, and of the kernels' texts that it includes.

    Comments, docstrings and blanks of Python do not count.
    """
    package = Path(__file__).resolve().parents[1]
    texts = []
    for path in sorted(path for folder in _RUN for path in (package / folder).rglob("*.*")):
        if path.suffix in (".py", ".cuh", ".hpp"):
            text = path.read_text(encoding="utf-8")
            texts.append(statements_of(text) if path.suffix == ".py" else text)
    return hash_of_text("\n".join(texts))


def _database_hash(slug: str) -> str:
    files = [database_path(directory, slug) for directory in tuned_dirs()]
    return hash_of_text("\n".join(path.read_text(encoding="utf-8") for path in files if path.is_file()))


# Model rows as a table: time a step, its ratio to Equitune's, memory.


def row_lines(row: Row) -> list[str]:
    """A line for the row, then one for each contender."""
    size = f"{row['atoms']} atoms, {row['edges']} edges"
    weights = ", random weights" if row["weights"] == "random" else ""
    runs = "" if is_of_one_run(row) else "; cells of several runs"
    lines = [f"{row['model']} on {row['structure']} ({size}), {row['pass']}, {row['dtype']}{weights}{runs}"]
    cells = row["contenders"]
    width = max(len(name) for name in cells)
    for name, cell in cells.items():
        lines.append(f"  {name:{width}}  {_cell_text(cell, cells.get(OURS, {}))}")
        if parts := cell.get("parts_ms"):
            from autotune.bench.dynamics import nanoseconds_a_day

            each = ", ".join(f"{part} {significant(value)}" for part, value in parts.items())
            day = f"{significant(nanoseconds_a_day(cell['wall_ms']))} ns a day"
            lines.append(f"  {'':{width}}  {day}; in ms: {each}; {cell['inputs']}")
        if name == OURS and cell.get("device_parts_ms"):
            lines.append(
                f"  {'':{width}}  device {time_text(cell['device_ms'] * 1e3)}: {shares_text(cell['device_parts_ms'])}"
            )
        if name == OURS and (held := cell.get("held_parts_mib")):
            lines.append(
                f"  {'':{width}}  kept for gradients {significant(sum(held.values()))} MiB: {shares_text(held)}"
            )
    return lines


def _cell_text(cell: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    if "error" in cell:
        return f"- {cell['error']}"
    parts = [f"{time_text(cell['wall_ms'] * 1e3):>9}", f"{cell['us_per_atom']:9.2f} us/atom"]
    if "wall_ms" in ours and cell is not ours:
        parts.append(f"{cell['wall_ms'] / ours['wall_ms']:6.2f}x")
    else:
        parts.append(" " * 7)
    if "peak_mib" in cell:
        parts.append(f"{cell['peak_mib']:8.0f} MiB")
    errors = ", ".join(f"{name} {error:.0e}" for name, error in cell.get("errors", {}).items())
    if (samples := len(cell.get("wall_samples_ms", ()))) < ENOUGH:
        parts.append(f"{samples} samples")
    return "  ".join([*parts, errors]).rstrip()


def our_form(cells: Mapping[str, Any]) -> str:
    """Equitune's form to compare: its captured one where that is faster, if others ran captured or compiled too."""
    times = {name: cells[name]["wall_ms"] for name in (OURS, CAPTURED) if cells.get(name, {}).get("wall_ms")}
    is_alike = any(path_and_form(name)[1] for name in cells if not is_ours(name))
    return min(times, key=times.__getitem__) if is_alike and times else OURS


def best_other(row: Row) -> tuple[str, float] | None:
    """The fastest contender without Equitune, and its milliseconds."""
    times = {
        name: cell["wall_ms"] for name, cell in row["contenders"].items() if not is_ours(name) and "wall_ms" in cell
    }
    return min(times.items(), key=lambda item: (item[1], item[0])) if times else None


def table_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row: Equitune's step in the form of :func:`our_form`, and how many times as long others take.

    Equitune inside cuEquivariance's conversion has a column where a row has it. A star: its cells are of several runs.
    """
    heads = ("model", "structure", "pass", "Equitune", "fastest other", "stock", "untuned", "memory", "stock's")
    body = [heads, *(_line(row) for row in rows)]
    if any(JOINT in row["contenders"] for row in rows):
        beside = ["with cuEquivariance", *(_joint(row["contenders"]) for row in rows)]
        body = [(*cells[:4], one, *cells[4:]) for cells, one in zip(body, beside, strict=True)]
    return aligned(body)


def aligned(body: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of cells, whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in body]


def _line(row: Row) -> tuple[str, ...]:
    cells = row["contenders"]
    ours, stock, default = (cells.get(name, {}) for name in (our_form(cells), STOCK, DEFAULT))
    other = best_other(row)
    shown = "-" if "wall_ms" not in ours else time_text(ours["wall_ms"] * 1e3)
    beside = "-" if other is None else f"{_ratio_of(cells[other[0]], ours)} {other[0]}"
    ratios = [_ratio_of(cell, ours) for cell in (stock, default)]
    memory = [f"{cell['peak_mib'] / 1024:.2f} GiB" if "peak_mib" in cell else "-" for cell in (ours, stock)]
    structure = row["structure"] + ("" if is_of_one_run(row) else "*")
    return (row["model"], structure, row["pass"], shown, beside, *ratios, *memory)


def _joint(cells: Mapping[str, Any]) -> str:
    return _ratio_of(cells.get(JOINT, {}), cells.get(our_form(cells), {}))


def _ratio_of(cell: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """How many times as long as ours it takes, with the interval, if there are samples enough."""
    if "wall_ms" not in cell or "wall_ms" not in ours:
        return time_text(cell["wall_ms"] * 1e3) if "wall_ms" in cell else "-"
    interval = range_text(ours.get("wall_samples_ms", ()), cell.get("wall_samples_ms", ()), paired=False)
    return f"{cell['wall_ms'] / ours['wall_ms']:.2f}x" + (f" ({interval})" if interval else "")
