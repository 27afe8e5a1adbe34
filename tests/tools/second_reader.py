"""Recomputes every table of README from the raw samples in ``results/``, without any code of the report.

    python tests/tools/second_reader.py [README.md]

Prints what differs, and ends with 1 if anything does. A figure may differ by its last digit: records keep medians
rounded to a tenth of a microsecond, and this reader takes the medians of the samples.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = "models/nvidia-h200.json", "models/intel-xeon-processor-2-cores.json"
# How people write the names of paths and forms.
WRITTEN = {
    "cuequivariance": "cuEquivariance",
    "openequivariance": "OpenEquivariance",
    "cuequivariance+openequivariance": "cuEquivariance and OpenEquivariance",
    "symmetrix": "Symmetrix-XL",
    "triton": "Allegro's Triton form",
    "aotinductor": "AOTInductor",
}
FORM = re.compile(r"-(captured|compiled|aotinductor)$")
PACKAGES = {"MACE": "mace", "NequIP": "nequip", "SevenNet": "sevennet", "Allegro": "allegro"}


class Measured:
    """A row: milliseconds by path, from its samples, of all paths that ran."""

    def __init__(self, row: dict[str, Any]) -> None:
        cells = row["contenders"]
        self.key, self.which, self.package = (row["model"], row["structure"]), row["pass"], row["package"]
        self.ms = {name: statistics.median(cell["wall_samples_ms"]) for name, cell in cells.items() if timed(cell)}
        self.device = {name: cell["device_ms"] for name, cell in cells.items() if cell.get("device_ms")}
        self.lost = {name for name, cell in cells.items() if cell.get("error") == "out of memory"}
        trained = "" if row["weights"] == "random" else ", trained"
        stress = ", with stress" if row["pass"] == "energy_forces_stress" else ""
        self.name = f"{row['model']}{trained}, {row['structure']}, {row['atoms']:,} atoms{stress}"
        others = [name for name in cells if not name.startswith("equitune")]
        # Like with like: captured steps count where others had a chance to run captured or compiled.
        forms = ["equitune", "equitune-captured"] if any(map(FORM.search, others)) else ["equitune"]
        known = [name for name in forms if name in self.ms]
        self.ours = min(known, key=self.ms.__getitem__) if known else ""
        ran = [name for name in others if name in self.ms]
        self.fastest = min(ran, key=self.ms.__getitem__) if ran else ""
        self.rival = FORM.sub("", self.fastest)
        self.least_device = min((self.device[name] for name in ran if name in self.device), default=math.nan)

    def over(self, path: str, base: str) -> float:
        return self.ms.get(path, math.nan) / self.ms.get(base, math.nan)

    @property
    def ratio(self) -> float:
        return self.over(self.fastest, self.ours)

    @property
    def device_ratio(self) -> float:
        return self.least_device / self.device.get(self.ours, math.nan)


def timed(cell: dict[str, Any]) -> bool:
    return bool(cell.get("wall_samples_ms"))


def rows_of(file: str, results: Path) -> list[Measured]:
    rows = json.loads((results / file).read_text())["rows"]
    return [Measured(row) for row in rows if row["pass"] != "largest" and row["dtype"] == "float32"]


def gains(rows: list[Measured]) -> dict[tuple[str, str], list[float]]:
    """Ratios by line and package, of every row that has one."""
    plain = {row.key: row for row in rows if row.which == "energy_forces"}
    lines: dict[str, tuple[str, Callable[[Measured], float]]] = {
        "energies and forces, each path in its fastest form": ("energy_forces", lambda row: row.ratio),
        "kernels: the same in time of the device alone": ("energy_forces", lambda row: row.device_ratio),
        "capture: Equitune captured over eager": (
            "energy_forces",
            lambda row: row.over("equitune", "equitune-captured"),
        ),
        "capture: the fastest other path's": (
            "energy_forces",
            lambda row: row.over(row.rival, f"{row.rival}-captured"),
        ),
        "energies, forces and stress, where stress is optional": ("energy_forces_stress", lambda row: row.ratio),
        "stress: its part of that": (
            "energy_forces_stress",
            lambda row: row.ratio / plain[row.key].ratio if row.key in plain else math.nan,
        ),
        "training step": ("training", lambda row: row.ratio),
        "step by ASE over the stock model's": ("md_step", lambda row: row.over("stock", row.ours)),
        "step by ASE over the fastest other path's": ("md_step", lambda row: row.ratio),
    }
    found: dict[tuple[str, str], list[float]] = {}
    for line, (which, ratio) in lines.items():
        for row in rows:
            if row.which == which and not math.isnan(value := ratio(row)):
                found.setdefault((line, row.package), []).append(value)
    return found


def written(path: str) -> str:
    form = FORM.search(path)
    name = FORM.sub("", path)
    return WRITTEN.get(name, name) + (f", {WRITTEN.get(form[1], form[1])}" if form else "")


# What a column of a table of times says of a row: milliseconds, a ratio or a name.
COLUMNS: dict[str, Callable[[Measured], Any]] = {
    "Equitune": lambda row: row.ms.get("equitune"),
    "Equitune, captured": lambda row: row.ms.get("equitune-captured"),
    "the fastest other path": lambda row: written(row.fastest),
    "its time": lambda row: row.ms.get(row.fastest),
    "its path eager": lambda row: row.ms.get(row.rival),
    "its path captured": lambda row: row.ms.get(f"{row.rival}-captured"),
    "times as fast": lambda row: row.ratio,
    "by device time": lambda row: row.device_ratio,
    "stock": lambda row: "out of memory" if "stock" in row.lost else row.ms.get("stock"),
    **{WRITTEN[name]: lambda row, name=name: "out of memory" if name in row.lost else row.ms.get(name)
       for name in ("cuequivariance", "openequivariance", "symmetrix")},
}  # fmt: skip
# Of steps of 1 fs, each in the form that is compared.
OF_STEPS: dict[str, Callable[[Measured], Any]] = {
    "Equitune": lambda row: row.ms.get(row.ours),
    "the fastest other path": lambda row: (written(row.fastest), row.ms.get(row.fastest)),
    "ns a day with Equitune": lambda row: 86.4 / row.ms[row.ours],
}


def tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Name, heads and rows of each table below a mark."""
    for found in re.finditer(r"^<!-- table: ([\w-]+) -->\n((?:\|.*\n)+)", text, re.MULTILINE):
        head, _, *body = ([cell.strip() for cell in line.strip("| \n").split(" | ")] for line in found[2].splitlines())
        yield found[1], head, body


def is_near(shown: str, value: Any) -> bool:
    """Whether a cell shows a value: within its last digit, for a time in the unit that it names."""
    if isinstance(value, tuple):
        name, _, time = shown.partition(": ")
        return name == value[0] and is_near(time, value[1])
    if value is None or value == "" or value != value:
        return shown == "-"
    if isinstance(value, str):
        return shown == value
    number = re.fullmatch(r"(\d+)(?:\.(\d+))?( ms| s)?", shown)
    if number is None:
        return False
    digit = 10.0 ** -len(number[2] or "")
    scale = 1000.0 if number[3] == " s" else 1.0
    return abs(float(shown.split()[0]) - value / scale) <= 1.01 * digit


def wrong_gains(head: list[str], body: list[list[str]], rows: list[Measured]) -> Iterator[str]:
    known = gains(rows)
    shown = {(line[0], PACKAGES[name]): cell for line in body for name, cell in zip(head[1:], line[1:], strict=True)}
    for key in sorted({*known, *shown}):
        cell, ratios = shown.get(key, "-"), known.get(key, [])
        if not ratios:
            if cell != "-":
                yield f"{key}: shows {cell}, and no row has such a ratio"
            continue
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        parts = re.fullmatch(r"([\d.]+) \(([\d.]+)\); (\d+)", cell)
        if parts is None or not (is_near(parts[1], mean) and is_near(parts[2], min(ratios))):
            yield f"{key}: shows {cell}; recomputed {mean:.3f} ({min(ratios):.3f})"
        elif int(parts[3]) != len(ratios):
            yield f"{key}: shows {parts[3]} rows; {len(ratios)} have the ratio"


def wrong_times(
    head: list[str], body: list[list[str]], rows: list[Measured], columns: dict[str, Callable[[Measured], Any]]
) -> Iterator[str]:
    known, shown = {row.name: row for row in rows}, {line[0]: line[1:] for line in body}
    for name in sorted(known.keys() ^ shown.keys()):
        yield f"{name}: {'not shown' if name in known else 'no such row'}"
    for name in known.keys() & shown.keys():
        for column, cell in zip(head[1:], shown[name], strict=True):
            if column not in columns:
                yield f"{column}: this reader knows no such column"
            elif not is_near(cell, value := columns[column](known[name])):
                yield f"{name}, {column}: shows {cell}; recomputed {value}"


def differences(text: str, results: Path = ROOT / "results") -> list[str]:
    """What the tables of a text show otherwise than the samples; each table must be one that is known here."""
    wrong: list[str] = []
    for name, head, body in tables(text):
        rows = rows_of(CPU if name.startswith("cpu") else GPU, results)
        if name == "gains":
            found = wrong_gains(head, body, rows)
        elif name == "simulation-steps":
            found = wrong_times(head, body, [row for row in rows if row.which == "md_step"], COLUMNS | OF_STEPS)
        elif name == "cpu-energies":
            kept = [row for row in rows if row.which.startswith("energy_forces") and row.key[1] == "mof"]
            found = wrong_times(head, body, kept, COLUMNS)
        else:
            found = iter(["this reader knows no such table"])
        wrong += [f"{name}: {line}" for line in found]
    return wrong


if __name__ == "__main__":
    lines = differences(Path(sys.argv[1] if sys.argv[1:] else ROOT / "README.md").read_text())
    print("\n".join(lines) or "every table is what its samples say")
    sys.exit(bool(lines))
