"""The page of a certificate: verdicts of each path, what fails and on which structure, every figure, provenance."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from typing import Any

from autotune.certification.checks import BATCH, CHECKS, CUT, FAIL, PASS, REFUSED
from autotune.certification.structures import from_record
from autotune.certification.table import beside, closest, difference_texts, figure_texts, verdict_text, without_values
from autotune.report.render import Page, Section, render
from autotune.text import path_name

SECTIONS = (
    Section("verdicts", "Verdicts", "certificate_verdicts.html"),
    Section("failures", "What fails", "certificate_failures.html"),
    Section("figures", "All figures", "certificate_figures.html"),
    Section("provenance", "Provenance", "certificate_provenance.html"),
)


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
        failing=[figure for verdict in verdicts for figure in verdict["figures"] if figure["verdict"] == FAIL],
        unable=[verdict for verdict in verdicts if verdict["lacking"]],
        says=[(check.name, check.says) for check in (*CHECKS, BATCH)],
        structures=[(name, one["formula"], len(one["numbers"])) for name, one in record["structures"].items()],
        left_out=list(record["left_out"].items()),
        not_asked=list(record.get("not_asked", {})),
        limits=record["limits"],
        reference=record["reference"],
        facts=list(_facts(record)),
        software=list(record["software"].items()),
    )


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    """One path in one precision. worst: the check that is closest to its limit, or the first that fails.

    energy, forces: the largest differences from the reference. lacking: what has no values, and why.
    """
    figures = {name: _figure(row, name, cell) for name, cell in row["checks"].items()}
    energy, forces = difference_texts(row)
    shown = {"text": verdict_text(row), "energy": energy, "forces": forces, "lacking": without_values(row)}
    return {**row, **shown, "figures": list(figures.values()), "worst": next(map(figures.get, closest(row)), None)}


def _figure(row: Mapping[str, Any], check: str, cell: Mapping[str, Any]) -> dict[str, str]:
    """One check of one path. where: the structure of its worst figure; xyz: the smallest that shows a failure."""
    small, xyz = cell.get("smallest"), io.StringIO()
    if small is not None:
        import ase.io

        ase.io.write(xyz, from_record(small), format="extxyz")
    texts = dict(zip(("value", "limit", "stock", "meaning"), figure_texts(cell), strict=True))
    where = cell["structure"] if small is None else f"{small['structure']}, reduced to {small['formula']}"
    about = {"path": row["path"], "dtype": row["dtype"], "check": check, "verdict": cell["verdict"]}
    return about | texts | {"where": where, "xyz": xyz.getvalue()}


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
        named = [
            f"{path_name(row['path'])} in {row['dtype']}" for row in record["paths"] if verdict_text(row) == verdict
        ]
        if named:
            texts.append(f"{', '.join(named)}: {words}.")
    return f"On {beside(record)}. {' '.join(texts)}"


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
