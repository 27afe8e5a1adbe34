"""The command that measures one row again, filled in."""

from __future__ import annotations

import json
from typing import Any

from autotune.report.data.suite_rows import SuiteRow, mapping
from autotune.report.html.markup import Markup, join, tag
from autotune.workload.config_tables import load_all, load_graphs
from autotune.workload.passes import DIRECTIONS_OF

FILE = "row.toml"


def kernel_command(row: SuiteRow, backend: str) -> Markup:
    """A config of this row alone and the command that reads it, or what to do if the row's names are not shipped."""
    problem, graph = row.text("label"), str(mapping(row.record.get("graph")).get("name") or "")
    own = [repr(name) for name, known in ((problem, load_all()), (graph, load_graphs())) if name not in known]
    if own:
        names = " and ".join(own)
        return tag("p", f"The config that was measured defines {names}: run equitune bench with that file.",
                   class_="hint")  # fmt: skip
    device = "cuda:0" if backend == "cuda" else "cpu"
    lines = [f"cat > {FILE} <<'END'", *config_lines(row), "END", f"equitune bench {FILE} --device {device} --fresh"]
    text = "The tuned schedule comes from the database, so nothing is searched. --fresh measures a stored row again."
    return join((commands("\n".join(lines)), tag("p", text, class_="hint")))


def config_lines(row: SuiteRow) -> list[str]:
    """A config with one workload and one pass."""
    given: dict[str, Any] = {
        "problem": row.text("label"),
        "graph": str(mapping(row.record.get("graph")).get("name")),
        **{key: row.text(key) for key in ("operation", "dtype", "layout")},
        "directions": list(DIRECTIONS_OF.get(row.which, (row.which,))),
        "passes": [row.which],
    }
    if row.deterministic:
        given["deterministic"] = True
    # Text, lists of text and true are written alike in JSON and TOML.
    return [f"{key} = {json.dumps(value)}" for key, value in given.items()]


def commands(text: str) -> Markup:
    return tag("pre", tag("code", text), tabindex="0", aria_label="Commands")
