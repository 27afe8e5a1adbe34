"""The page of a certificate: verdicts of each path, what fails and on which structure, every figure, provenance."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.certification.checks import BATCH, CHECKS, CUT, FAIL, PASS, REFUSED
from autotune.certification.structures import from_record
from autotune.certification.table import beside, difference_texts, verdict_text, without_values
from autotune.report.render import Page, Section, render
from autotune.text import MISSING, TUNED, contender_name

SECTIONS = (
    Section("verdicts", "Verdicts", "certificate_verdicts.html"),
    Section("failures", "What fails", "certificate_failures.html"),
    Section("figures", "All figures", "certificate_figures.html"),
    Section("provenance", "Provenance", "certificate_provenance.html"),
)
_KINDS = {FAIL: "failed"}


@dataclass(frozen=True)
class Figure:
    """One check of one path. where: the structure of its worst figure; xyz: the smallest that shows a failure."""

    path: str
    dtype: str
    check: str
    verdict: str
    value: str
    limit: str
    stock: str
    meaning: str
    where: str
    of_limit: float
    xyz: str

    @property
    def kind(self) -> str:
        return _KINDS.get(self.verdict, "")


@dataclass(frozen=True)
class Verdict:
    """One path in one precision. worst: the check that is closest to its limit, or the first that fails.

    energy, forces: the largest differences from the reference. lacking: what has no values, and why.
    """

    path: str
    dtype: str
    verdict: str
    text: str
    energy: str
    forces: str
    reason: str
    lacking: list[str]
    note: str
    worst: Figure | None
    figures: tuple[Figure, ...]

    @property
    def kind(self) -> str:
        return _KINDS.get(self.verdict, "")


def build_certificate(record: Mapping[str, Any], name: str) -> Page:
    """The page of a record as ``autotune.certification`` makes it. name: of its files, without a suffix."""
    verdicts = [_verdict(row) for row in record["paths"]]
    return render(
        "certificate.html",
        name,
        {},
        sections=SECTIONS,
        title=record["model"]["name"],
        sentence=sentence(record),
        verdicts=verdicts,
        failing=[figure for verdict in verdicts for figure in verdict.figures if figure.verdict == FAIL],
        unable=[verdict for verdict in verdicts if verdict.lacking],
        says=[(check.name, check.says) for check in (*CHECKS, BATCH)],
        structures=[(name, one["formula"], len(one["numbers"])) for name, one in record["structures"].items()],
        left_out=list(record["left_out"].items()),
        not_asked=list(record.get("not_asked", {})),
        limits=record["limits"],
        reference=record["reference"],
        facts=list(_facts(record)),
        software=list(record["software"].items()),
    )


def page_name(record: Mapping[str, Any]) -> str:
    """Of the model, its weights, the device and a hash: ``certificate-my-model-1f0c2a-nvidia-h200-9b3d07``.

    The hash is of structures, seed, effort, paths, dtypes and the budget.
    """
    asked = [record.get(name) for name in ("structures", "seed", "effort", "asked")] + list(record["left_out"])
    asked += [record["budget_s"]] if "budget_s" in record else []  # what is cut replaces nothing that is whole
    question = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:6]
    model, device = record["model"], record["device"]
    words = f"certificate {model['name']} {model['weights'][:6]} {device['slug']} {question}"
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def sentence(record: Mapping[str, Any]) -> str:
    """The result in plain words."""
    texts = []
    for verdict, words in (
        (PASS, "the same potential"),
        (FAIL, "not the same potential"),
        ("fail (error)", "an error"),
        (REFUSED, "refused"),
        (CUT, "cut by the budget, before all was asked"),
    ):
        named = [f"{_name(row['path'])} in {row['dtype']}" for row in record["paths"] if verdict_text(row) == verdict]
        if named:
            texts.append(f"{', '.join(named)}: {words}.")
    return f"On {beside(record)}. {' '.join(texts)}"


def _name(path: str) -> str:
    return "Equitune" if path == TUNED else contender_name(path)


def _verdict(row: Mapping[str, Any]) -> Verdict:
    figures = tuple(_figure(row, name, cell) for name, cell in row["checks"].items())
    ordered = sorted(figures, key=lambda figure: (figure.verdict != FAIL, -figure.of_limit))
    worst = ordered[0] if ordered else None
    return Verdict(
        row["path"],
        row["dtype"],
        row["verdict"],
        verdict_text(row),
        *difference_texts(row),
        row["reason"],
        without_values(row),
        row["note"],
        worst,
        figures,
    )


def _figure(row: Mapping[str, Any], check: str, cell: Mapping[str, Any]) -> Figure:
    small = cell.get("smallest")
    return Figure(
        path=row["path"],
        dtype=row["dtype"],
        check=check,
        verdict=cell["verdict"],
        value="not finite" if cell["value"] is None else f"{cell['value']:.1e} {cell['unit']}",
        limit=_short(cell["limit"]),
        stock=_short(cell["stock"]),
        meaning=_short(cell["mev_per_atom"]),
        where=cell["structure"] if small is None else f"{small['structure']}, reduced to {small['formula']}",
        of_limit=float("inf") if cell["of_limit"] is None else cell["of_limit"],
        xyz="" if small is None else _xyz(small),
    )


def _short(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1e}"


def _xyz(structure: Mapping[str, Any]) -> str:
    """The extended XYZ text of a structure."""
    import ase.io

    text = io.StringIO()
    ase.io.write(text, from_record(dict(structure)), format="extxyz")
    return text.getvalue()


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, device = record["model"], record["device"]
    found = [
        ("model", f"{model['name']}, {model['class']}"),
        ("package", f"{model['package']} {model.get('package_version', '')}".strip()),
        ("parameters", f"{model['parameters']:,}, SHA-256 of the weights {model['weights']}..."),
        ("elements", f"{len(model['species'])}, cutoff {model['cutoff']:g} Å, saved in {model['dtype']}"),
        ("device", device["name"]),
        ("Equitune", f"{record['equitune']}, generator {record['generator']}"),
        ("made", record["made"]),
        ("seed, effort", f"{record['seed']}, {record['effort']}"),
    ]
    return found + ([("file", f"{model['file']}, SHA-256 {model['sha256']}")] if "file" in model else [])
