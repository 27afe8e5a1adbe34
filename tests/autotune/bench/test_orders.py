"""The time of ordering a graph is added to rows that were measured without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from autotune.bench import kernels as orders
from autotune.bench.kernels import add_orders
from autotune.bench.rows import store_rows, stored_rows, without_noise
from autotune.compare.peers import ADAPTERS
from kernelgen.device import device_facts

RECORD = ROOT / "results" / "bench" / "intel-xeon-processor-2-50ghz-2-cores.json"


LABELS = ("diffdock-l1", "tetris-poly-1", "batmobile-l3-vectors")


def rows() -> list[dict[str, Any]]:
    """Forward rows of a CPU: two convolutions, their plain products, and a convolution of vectors."""
    found = [row for row in json.loads(RECORD.read_text())["rows"] if row["label"] in LABELS]
    found = [row for row in found if row["pass"] == "forward"]
    return [{key: value for key, value in row.items() if key not in ("order_ms", "order_date")} for row in found]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is timed: each thing takes a millisecond more than the last, and nothing takes no time."""
    asked: list[Any] = []

    def order_ms(order: Any, sender: Any, receiver: Any) -> float:
        if order is None:
            return 0.0
        assert order(sender, receiver) is not None
        asked.append((len(sender), order))
        return float(len(asked))

    monkeypatch.setattr(orders, "order_ms", order_ms)
    return asked


def test_rows_of_one_graph_share_what_is_measured_once(tmp_path: Path, timed: list[Any]) -> None:
    facts, before, said = device_facts("cpu"), rows(), list[str]()
    assert sorted(row["operation"] for row in before) == ["conv", "conv", "plain", "plain", "vectors"]
    store_rows(tmp_path, facts, before)
    done = add_orders("cpu", tmp_path, said.append)
    assert sorted(row["label"] for row in done) == sorted(LABELS)
    for row in done:
        ours = {name: row["order_ms"][name] for name in ("equitune", "equitune-default")}
        assert set(ours.values()) <= {1.0, 2.0} and row["order_date"]
        assert row["order_ms"].get("e3nn", 0.0) == 0.0 and set(row["order_ms"]) <= set(row["times"])
    assert 1 <= len(timed) <= 2 and {edges for edges, _ in timed} == {done[0]["graph"]["edges"]}
    after = stored_rows(tmp_path, facts)
    assert len(after) == len(before)
    for row in after:
        assert ("order_ms" in row) is (row["operation"] != "plain")
    plain = [{key: value for key, value in row.items() if not key.startswith("order")} for row in after]
    assert sorted(plain, key=str) == sorted(map(without_noise, before), key=str), "nothing else has changed"
    assert add_orders("cpu", tmp_path, said.append) == []
    assert said[-1] == "0 of 0 rows without the time of ordering their graph have it now"


def test_a_graph_that_is_not_here_is_told(tmp_path: Path, timed: list[Any]) -> None:
    one, other = rows()[:1], rows()[:1]
    one[0]["graph"] = one[0]["graph"] | {"name": "nowhere"}
    other[0] |= {"graph": other[0]["graph"] | {"edges": 7}, "layout": "mul_ir"}
    store_rows(tmp_path, device_facts("cpu"), [*one, *other])
    said: list[str] = []
    assert add_orders("cpu", tmp_path, said.append) == [] and not timed
    assert any("graph 'nowhere' is not known here" in line for line in said)
    assert any("edges here and had 7" in line for line in said)
    assert said[-1].startswith("0 of 2 rows")


def test_a_peer_that_orders_is_timed_too() -> None:
    ordering = {adapter.name for adapter in ADAPTERS if adapter.order is not None}
    assert "openequivariance-deterministic" in ordering and "e3nn" not in ordering
