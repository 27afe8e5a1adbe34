"""The command that measures one row again, filled in."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from autotune.report.data.suite_rows import SuiteRow, mapping
from autotune.report.html.markup import Markup, join, tag
from autotune.workload.config import load_all, load_graphs

FILE = "row.toml"


class Shipped(NamedTuple):
    """What configs may name: the keys of problems by name, and the graphs."""

    problems: dict[str, str]
    graphs: Collection[str]


def shipped() -> Shipped:
    return Shipped({name: problem.key for name, problem in load_all().items()}, load_graphs().keys())


def kernel_command(row: SuiteRow, backend: str, known: Shipped) -> Markup:
    """A config of this row alone and the command that reads it, or what to do if its config has names of its own."""
    problem, graph = row.text("label"), str(mapping(row.record.get("graph")).get("name") or "")
    own = [] if known.problems.get(problem) == row.text("problem") else [repr(problem)]
    own += [] if graph in known.graphs else [repr(graph)]
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
        "directions": list(row.kind.passes.get(row.which, (row.which,))),
        "passes": [row.which],
    }
    if row.deterministic:
        given["deterministic"] = True
    # Text, lists of text and true are written alike in JSON and TOML.
    return [f"{key} = {json.dumps(value)}" for key, value in given.items()]


def commands(text: str) -> Markup:
    return tag("pre", tag("code", text), tabindex="0", aria_label="Commands")
