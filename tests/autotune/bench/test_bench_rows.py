"""Rows of comparisons: what is stored of them, which peers count, and what a summary says."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from database_samples import HOST
from places import ROOT
from rich.console import Console

from autotune.bench import kernels as bench
from autotune.bench import rows as bench_rows
from autotune.bench.rows import (
    SuiteRow,
    identity_of,
    markdown_text,
    seconds_text,
    store_rows,
    stored_rows,
    summary_lines,
    table_lines,
)
from autotune.workload.config import load_problems
from kernelgen.problem.product import RadialProblem


def row(which: str = "forward", ours: float = 100.0, peer: float | None = 200.0, **changes: Any) -> dict[str, Any]:
    times = {"equitune": {"time_us": ours}, "equitune-default": {"time_us": 1.5 * ours}}
    times |= {"slow": {"time_us": 900.0}, "fast": {"error": "broken"} if peer is None else {"time_us": peer}}
    data = {"label": "tiny", "problem": "key", "operation": "conv", "dtype": "float32", "layout": "ir_mul"}
    data |= {"graph_class": "conv-e17-d7", "graph": {"name": "carbon", "edges": 1, "nodes": 1}, "pass": which}
    return data | {"times": times, "floor_us": 50.0, "memory": {}} | changes


def test_summary_says_where_we_stand() -> None:
    rows = [
        row(ours=100.0, peer=400.0),
        row(ours=100.0, peer=102.0, memory={"equitune": 3 << 20, "fast": 1 << 20, "slow": 9 << 20}),
        row("backward", ours=100.0, peer=99.0, memory={"equitune": 1 << 20, "fast": 2 << 20}),
        row("backward", ours=100.0, peer=None, deterministic=True),
    ]
    text = "\n".join(summary_lines(rows))
    assert f"conv float32 forward: {(4.0 * 1.02) ** 0.5:.2f} (1.02), 2 rows" in text
    assert "conv float32 backward: 0.99 (0.99), 1 row\n" in text
    assert "conv float32 deterministic backward: 9.00" in text, "the slow peer is the fastest with a number"
    assert "speed-up below 1.00: 1; below 1.05: 2 of 4" in text
    assert "  0.990 tiny on carbon, conv float32, backward (fast)" in text
    assert "on carbon and water (float32), forward: 2.00" in text
    assert "more memory than their fastest peer: 1 of 2" in text and "3.0 MiB, fast 1.0 MiB" in text
    assert "equitune-default / equitune: 1.50" in text and "default is faster" not in text


def test_a_ratio_has_its_interval_if_the_samples_suffice() -> None:
    one = row(ours=100.0, peer=200.0)
    one["times"]["equitune"]["samples_us"] = [100.0 + number for number in range(20)]
    one["times"]["fast"]["samples_us"] = [2.1 * (100.0 + number) for number in range(20)]
    one["times"]["slow"]["samples_us"] = [900.0] * 3
    (line,) = [line for line in table_lines([one]) if "tiny" in line]
    assert "(2.00x, 2.10 to 2.10)" in line and "(9.00x)" in line and "(1.50x)" in line


def test_energy_is_compared_where_both_were_measured() -> None:
    measured = row(joules={"equitune": 0.02, "fast": 0.03, "slow": 0.5})
    text = "\n".join(summary_lines([measured, row(joules={"equitune": 0.02}), row("backward")]))
    assert "energy of a call, fastest peer / equitune: 1.50 (geometric mean), 1 row\n" in text
    assert "  tiny on carbon, conv float32, forward: 20 mJ, fast 30 mJ" in text
    assert "energy" not in "\n".join(summary_lines([row()]))


def test_a_peer_of_less_accuracy_is_timed_but_not_compared() -> None:
    """TF32 where float32's accuracy is asked; where TF32 is, it is the fastest peer."""
    product = load_problems()["tiny"]
    asked = {
        accuracy: row(
            problem=RadialProblem(product, 8, accuracy).key,
            operation="radial",
            errors={"fast": {"forward": {"g": {"error": 3e-4, "block": "1o"}}}, "slow": {"forward": {"g": 4e-7}}},
        )
        for accuracy in ("ieee", "tf32")
    }
    assert (SuiteRow(asked["ieee"]).peer, SuiteRow(asked["tf32"]).peer) == ("slow", "fast")
    assert (SuiteRow(asked["ieee"]).ratio, SuiteRow(asked["tf32"]).ratio) == (9.0, 2.0)
    told = "less accurate than the row asks, so not compared: fast in 1 row"
    assert told in "\n".join(summary_lines([*asked.values()]))
    assert told not in "\n".join(summary_lines([asked["tf32"]]))
    assert SuiteRow(asked["ieee"] | {"problem": "unknown|key"}).less_accurate == set()
    entry = {"operation": "radial", "dtype": "float32", "peers": {"product-ieee": {}, "product-tf32": {}}}
    judged = {kind: SuiteRow(entry | {"problem": asked[kind]["problem"]}).less_accurate for kind in ("ieee", "tf32")}
    assert judged == {"ieee": {"product-tf32"}, "tf32": set()}, "an entry has no errors of peers"


def test_a_new_graph_in_every_call_is_a_line_where_it_was_measured() -> None:
    orders = {"equitune": 0.05, "slow": 0.0, "fast": 0.0}
    rows = [row(peer=300.0, order_ms=orders), row(peer=300.0, order_ms=orders | {"fast": 0.9}), row()]
    text = "\n".join(summary_lines(rows))
    # 300 / (100 + 50), and 900 / 150: there the slow one is the fastest that has ordered the graph.
    wanted = (
        f"with ordering of a new graph in every call: {(2.0 * 6.0) ** 0.5:.2f} (2.00), 2 rows; the ordering takes 0.50"
    )
    assert wanted in text
    assert "ordering" not in "\n".join(summary_lines([row()])), "older records"


def test_the_parts_of_a_comparison_are_told_the_longest_first() -> None:
    text = seconds_text({"set up": 1.25, "sample forward": 3.0, "copy": 0.01})
    assert text == "4.3 s: sample forward 3.0, set up 1.2"


def test_a_summary_without_a_peers_time_says_so() -> None:
    alone = row()
    alone["times"] = {name: alone["times"][name] for name in alone["times"] if name.startswith("equitune")}
    text = "\n".join(summary_lines([alone]))
    assert "1 row; no peer has a time" in text and "speed-up" not in text


def test_markdown_has_a_line_a_row_and_the_summary() -> None:
    rows = [row(), row("backward", peer=None, deterministic=True)]
    lines = markdown_text(rows).replace("\N{NO-BREAK SPACE}", " ").splitlines()
    assert lines[2] == "| problem | graph | kernel | pass | equitune | equitune-default | slow | fast |"
    assert lines[3] == "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |"
    assert lines[4].startswith("| tiny | carbon | conv float32 | forward | 100 \N{MICRO SIGN}s | ")
    assert lines[5].startswith("| tiny | carbon | conv float32 deterministic | backward |")
    assert lines[5].endswith("| failed |")
    assert lines[7] == "```text" and lines[-1] == "```" and any("geometric mean" in line for line in lines[8:])


def test_summary_names_rows_whose_default_is_faster_beyond_noise() -> None:
    def faster(*samples: float) -> dict[str, Any]:
        times = {
            "equitune": {"time_us": 100.0, "samples_us": [99.0, 100.0, 101.0] * 4},
            "equitune-default": {"time_us": 90.0, "samples_us": samples * 4},
        }
        return row(times=times | {"fast": {"time_us": 200.0}})

    text = "\n".join(summary_lines([row(), faster(89.0, 90.0, 91.0), faster(70.0, 90.0, 110.0)]))
    told = "rows where the default is faster (tune them): 1 of 3\n  0.900 tiny on carbon, conv float32, forward"
    assert told in text and "not at rest" not in text
    noisy, same = faster(89.0, 90.0, 91.0), faster(89.0, 90.0, 91.0)
    noisy["times"]["fast"]["conditions"] = {"noise": "other processes kept 1.7 cores busy"}
    same["schedules"] = dict.fromkeys(("equitune", "equitune-default"), {"forward": {"lanes": 4}})
    text = "\n".join(summary_lines([noisy, same]))
    assert "default is faster" not in text, "noise, and one schedule under two names"
    assert "not at rest in 1 of 2 rows: other processes kept 1.7 cores busy; compare again later, with --fresh" in text


def test_summary_says_each_reason_once_and_what_equitune_is() -> None:
    def failed(reason: str, origin: str) -> dict[str, Any]:
        found = row(peer=None, origins={"forward": origin})
        found["times"]["fast"] = {"error": reason}
        return found

    reason = "PeerError: fast: forward disagrees with float64 e3nn by more than 0.001: g {}"
    rows = [failed(reason.format("1.4e+00"), "default"), failed(reason.format("1.2e+00"), "exact"), row()]
    rows.append(failed("not compared: a call takes 3 s", "predicted"))
    lines = summary_lines(rows)
    assert lines[:2] == [
        "failed in 2 rows, fast: forward disagrees with float64 e3nn by more than 0.001: g 1.4e+00",
        "left out in 1 row, fast: not compared: a call takes 3 s",
    ]
    assert "equitune is not tuned in 2 of 4 rows: default, predicted" in lines
    assert lines[0] in markdown_text(rows)


def test_summary_of_rows_without_numbers() -> None:
    broken = row(peer=None)
    broken["times"] = {"equitune": {"error": "x"}, "equitune-default": {"error": "x"}, "fast": {"error": "y"}}
    assert math.isnan(SuiteRow(broken).ratio)
    text = "\n".join(summary_lines([broken]))
    assert "no time of equitune: tiny on carbon" in text and "no time of any peer: tiny on carbon" in text


def test_rows_replace_those_of_their_identity_only(tmp_path: Path) -> None:
    old = row()
    store_rows(tmp_path, HOST, [old, row("backward")])
    assert identity_of(old) == identity_of(old | {"deterministic": False}), "rows older than the mode"
    store_rows(tmp_path, HOST, [row(ours=50.0, deterministic=False), row(ours=70.0, deterministic=True)])
    found = stored_rows(tmp_path, HOST)
    assert [(r["pass"], r.get("deterministic", False), r["times"]["equitune"]["time_us"]) for r in found] == [
        ("backward", False, 100.0),
        ("forward", False, 50.0),
        ("forward", True, 70.0),
    ]
    path = bench_rows.bench_path(tmp_path, HOST)
    path.write_text('{"rows": [{"problem": 3}]}')
    assert stored_rows(tmp_path, HOST) == []
    store_rows(tmp_path, HOST, [old])
    assert len(stored_rows(tmp_path, HOST)) == 1
    (aside,) = path.parent.glob("*.corrupt-*.json")
    assert aside.read_text() == '{"rows": [{"problem": 3}]}'


def test_a_peer_that_fails_on_this_machine_costs_no_stored_row(tmp_path: Path) -> None:
    console, same = Console(file=io.StringIO(), width=300), {"sources": {"forward": "a"}, "software": {"torch": "2.11"}}
    run = bench._Run("cpu", HOST, tmp_path, ("fast",), 0.0, console)
    before = row(schedules={"equitune": {"forward": {"lanes": 4}}}, date="2026-11-01T00:00:00+00:00", **same)
    store_rows(tmp_path, HOST, [before])
    newer = row(ours=90.0, peer=None, schedules=before["schedules"], date="2026-11-02T00:00:00+00:00", **same)
    new = row("backward", peer=None, **same)
    assert run._store([newer, new]) == [before | {"tried": newer["date"]}, new]
    told = "tiny on carbon, conv float32, forward: fast failed and has a time in the stored row, which stays: broken"
    assert told in console.file.getvalue()  # type: ignore[attr-defined]
    for changed in ({"sources": {"forward": "b"}}, {"software": {"torch": "2.13"}}, {"schedules": {}}):
        assert run._store([newer | changed]) == [newer | changed], "the kernel or the peer may be another one"
        store_rows(tmp_path, HOST, [before])
    assert run._store([row(ours=90.0, **same)]) == [row(ours=90.0, **same)], "nothing failed"


def test_a_record_has_a_line_a_row_and_no_digits_that_mean_nothing(tmp_path: Path) -> None:
    times = {"equitune": {"time_us": 100.123, "samples_us": [100.123, 9876.543]}}
    noisy = row(times=times, floor_us=34.87842130088806, errors={"equitune": {"forward": {"g": 1.23456789e-07}}})
    noisy["certificates"] = {"equitune": {"forward": {"bitwise": True, "equivariance": 2.3456789e-07, "edges": 12288}}}
    noisy["order_ms"] = {"equitune": 0.061234567}
    store_rows(tmp_path, HOST, [noisy, row("backward")])
    path = bench_rows.bench_path(tmp_path, HOST)
    head, *lines, last = path.read_text().splitlines()
    assert head.endswith('"rows":[') and len(lines) == 2 and last == "]}" and ": " not in lines[0]
    (_, found) = stored_rows(tmp_path, HOST)
    assert found["times"] == times and found["floor_us"] == noisy["floor_us"], "times keep all their digits"
    assert found["errors"]["equitune"]["forward"] == {"g": 1.235e-07}
    certificate = {"bitwise": True, "equivariance": 2.346e-07, "edges": 12288}
    assert found["certificates"]["equitune"]["forward"] == certificate and found["order_ms"] == {"equitune": 0.06123}

    path.write_text(json.dumps({"schema": 1, "device": {}, "rows": [noisy]}, indent=1))
    assert stored_rows(tmp_path, HOST) == [noisy], "records with spaces and all digits are read as before"


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "bench").glob("*.json")), ids=str)
def test_published_rows_are_understood(path: Path) -> None:
    facts = dataclasses.replace(HOST, name=path.stem.replace("-", " "))
    assert facts.slug == path.stem
    rows = stored_rows(path.parent.parent, facts)
    assert rows and len({identity_of(row) for row in rows}) == len(rows)
