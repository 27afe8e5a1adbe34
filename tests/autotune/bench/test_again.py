"""Stored rows from before a date are measured again, all by one set of code."""

from __future__ import annotations

import io
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from rich.console import Console

from autotune.bench import kernels as bench
from autotune.bench.kernels import by_age, parse_date, plans_again
from autotune.bench.rows import identity_of, store_rows, stored_rows
from autotune.compare.comparison import ComparisonResult, Result
from autotune.errors import ConfigError
from kernelgen.device import device_facts

RECORD = ROOT / "results" / "bench" / "intel-xeon-processor-2-50ghz-2-cores.json"
OLD, NEW = "2026-11-01T00:00:00+00:00", "2026-11-20T00:00:00+00:00"


def rows() -> list[dict[str, Any]]:
    """A convolution in two passes and a plain product in one, all old, and a convolution that is newer."""
    found = [row for row in json.loads(RECORD.read_text())["rows"] if row["dtype"] == "float32"]
    by_kernel = {(row["label"], row["operation"], row["pass"]): row for row in found}
    old = [("diffdock-l1", "conv", "forward"), ("diffdock-l1", "conv", "backward"), ("diffdock-l1", "plain", "forward")]
    return [by_kernel[name] | {"date": OLD} for name in old] + [
        by_kernel["batmobile-l3-vectors", "vectors", "forward"] | {"date": NEW}
    ]


def test_a_date_without_a_zone_is_utc() -> None:
    assert parse_date("2026-11-26") == datetime(2026, 11, 26, tzinfo=timezone.utc)
    assert parse_date("2026-11-26T09:30+01:00") == parse_date("2026-11-26T08:30")
    with pytest.raises(ConfigError, match=r"'soon' is no date; expected one such as 2026-11-26"):
        parse_date("soon")


def test_plans_are_those_of_old_rows(tmp_path: Path) -> None:
    facts = device_facts("cpu")
    store_rows(tmp_path, facts, rows())
    said: list[str] = []
    plans = plans_again(parse_date("2026-11-10"), facts, tmp_path, said.append)
    assert [(plan.workload.label, plan.workload.operation, plan.passes) for plan in plans] == [
        ("diffdock-l1", "conv", ("forward", "backward")),
        ("diffdock-l1", "plain", ("forward",)),
    ]
    assert said == []
    for plan in plans:
        kernels = {name for which in plan.passes for name in plan.workload.kind.passes[which]}
        assert set(plan.workload.directions) == kernels, "no kernel that no pass needs is checked"
        assert set(plan.schedules) == {"equitune", "equitune-default"}


def test_the_oldest_rows_come_first_and_kinds_stay_together() -> None:
    """So a run that was stopped continues with what is oldest, and each kind is set up once."""
    conv, _, plain, vectors = rows()
    far = conv | {"graph": conv["graph"] | {"name": "nowhere"}, "date": NEW}
    plain, vectors = (row | {"date": f"2026-11-{day}T00:00:00+00:00"} for row, day in ((plain, 10), (vectors, "05")))
    given = [plain, far, vectors, conv]
    assert sorted(given, key=by_age(given)) == [conv, far, vectors, plain]
    given = [plain, far, vectors]
    assert sorted(given, key=by_age(given)) == [vectors, plain, far]


def test_a_graph_that_is_not_here_is_told(tmp_path: Path) -> None:
    row = rows()[0]
    store_rows(tmp_path, device_facts("cpu"), [row | {"graph": row["graph"] | {"name": "nowhere"}}])
    said: list[str] = []
    assert plans_again(parse_date("2026-12-01"), device_facts("cpu"), tmp_path, said.append) == []
    assert len(said) == 1 and "left out, graph 'nowhere' is not known here" in said[0]


def test_the_same_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run has measured or tried is newer than its date; a comparison that stopped it is made by the next.

    Here the peer fails in all of them, so that rows of the same software stay.
    """
    compared: list[str] = []

    def compare(setting: Any, passes: tuple[str, ...], *_: Any, **__: Any) -> ComparisonResult:
        if len(compared) == 1:
            compared.append("stopped")
            raise KeyboardInterrupt
        compared.append(setting.workload.operation)
        results = {name: {which: Result(error="made up") for which in passes} for name in ("equitune", "e3nn")}
        return ComparisonResult(results, copy_bandwidth=1e9)

    monkeypatch.setattr(bench, "run_comparison", compare)
    monkeypatch.setattr(bench._Run, "_compile_ahead", lambda *_: None)
    facts, date = device_facts("cpu"), parse_date("2026-11-10")
    store_rows(tmp_path, facts, rows())
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        bench.bench(date, "cpu", tmp_path, peers=(), console=console)
    found = bench.bench(date, "cpu", tmp_path, peers=(), console=console)
    assert compared == ["conv", "stopped", "plain"] and [row["operation"] for row in found] == ["plain"]
    after = {identity_of(row): row for row in stored_rows(tmp_path, facts)}
    assert len(after) == 4 and all(parse_date(row.get("tried", row["date"])) > date for row in after.values())
    assert bench.bench(date, "cpu", tmp_path, peers=(), console=console) == []
