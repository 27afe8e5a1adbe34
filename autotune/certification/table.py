"""A certificate's record in words: the table for a terminal, and texts that the page shows too."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from autotune.certification.checks import CUT, FAIL, REFUSED
from autotune.text import MISSING, STOCK, counted


def table_of(record: Mapping[str, Any]) -> str:
    """A line for each path and precision: verdict, largest differences from the reference, what is closest to failing.

    Below it, why paths have no values.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    model = record["model"]
    title = (
        f"{model['name']} ({model['package']}, {len(model['species'])} elements, cutoff {model['cutoff']:g} Å) on "
        f"{record['device']['name']}: {beside(record)}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("path", "precision", "verdict", "energy, meV/atom", "forces, eV/Å", "closest to its limit"):
        table.add_column(name, justify="right" if "eV" in name else "left", no_wrap=True)
    for name in ("figure", "limit", "stock's own", "meV an atom"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("on")
    for row in record["paths"]:
        worst = closest(row)
        shown = [name for name in worst if row["checks"][name]["verdict"] == FAIL] or worst[:1]
        head = (row["path"], row["dtype"], verdict_text(row), *difference_texts(row))
        for place, name in enumerate(shown):
            cell = row["checks"][name]
            where, small = cell["structure"], cell.get("smallest")
            if small is not None:
                where = f"{small['structure']}, {counted(small['atoms'], 'atom')}: {small['formula']}"
            table.add_row(*(head if place == 0 else [""] * len(head)), name, *figure_texts(cell), where)
        if not shown:
            table.add_row(*head)
    out = io.StringIO()
    Console(file=out, width=1000, no_color=True, markup=False, emoji=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    lines += [f"{row['path']} in {row['dtype']} {said}" for row in record["paths"] for said in without_values(row)]
    notes = {(row["path"], row["note"]) for row in record["paths"] if row["path"] == STOCK and row["note"]}
    lines += [f"{path}: {note}" for path, note in sorted(notes)]
    lines += [f"left out: {name}: {reason}" for name, reason in record["left_out"].items()]
    if unasked := record.get("not_asked"):
        lines.append(f"no path was asked about {', '.join(unasked)}: {next(iter(unasked.values()))}")
    return "\n".join(lines).strip("\n")


def beside(record: Mapping[str, Any]) -> str:
    """On how many structures, and what is the truth."""
    return f"{counted(len(record['structures']), 'structure')}, beside {record['reference']}"


def verdict_text(row: Mapping[str, Any]) -> str:
    """``fail (error)`` if no value is wrong, but some are missing."""
    is_wrong = any(cell["verdict"] == FAIL for cell in row["checks"].values())
    return "fail (error)" if row["verdict"] == FAIL and not is_wrong else str(row["verdict"])


def difference_texts(row: Mapping[str, Any]) -> tuple[str, str]:
    """The largest differences from the reference: of energy in meV/atom, of forces in eV/Å."""
    if not row["checks"] or "differences" not in row:
        return MISSING, MISSING
    scaled = ((row["differences"]["energy"], 1e3), (row["differences"]["forces"], 1.0))
    energy, forces = ("not finite" if value is None else f"{by * value:.1e}" if value else "0" for value, by in scaled)
    return energy, forces


def without_values(row: Mapping[str, Any]) -> list[str]:
    """What a path does not compute, and why: all, or some structures."""
    if "failed" not in row:
        return [f"{ {REFUSED: 'is refused', CUT: 'is cut'}.get(row['verdict'], 'cannot be opened') }: {row['reason']}"]
    named: dict[tuple[str, str], list[str]] = {}
    lacking = (
        ("refuses", row["refused"]),
        ("fails on", row["failed"]),
        ("was not asked about", row.get("not_asked", {})),
    )
    for verb, structures in lacking:
        for name, said in structures.items():
            named.setdefault((verb, said), []).append(name)
    return [f"{verb} {', '.join(names)}: {said[:300]}" for (verb, said), names in named.items()]


def closest(row: Mapping[str, Any]) -> list[str]:
    """Names of a path's checks: those that fail, then by how near to its limit the figure is."""
    of_limit = {
        name: float("inf") if cell["of_limit"] is None else cell["of_limit"] for name, cell in row["checks"].items()
    }
    return sorted(of_limit, key=lambda name: (row["checks"][name]["verdict"] != FAIL, -of_limit[name]))


def figure_texts(cell: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A check's figure, its limit, stock's own figure, and what it means in meV an atom."""

    def text(value: float | None) -> str:
        return MISSING if value is None else f"{value:.1e}"

    value = "not finite" if cell["value"] is None else f"{cell['value']:.1e} {cell['unit']}"
    return value, text(cell["limit"]), text(cell["stock"]), text(cell["mev_per_atom"])
