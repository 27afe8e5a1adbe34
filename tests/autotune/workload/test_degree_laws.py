"""Graphs by a law of their degrees: sizes, classes with skew, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.bench.rows import summary_lines
from autotune.errors import ConfigError
from autotune.workload.config import graph_from, load_config, load_graphs
from autotune.workload.graphs import DegreeLaw, build_graph
from autotune.workload.workload import GraphClass


@pytest.mark.parametrize(
    ("name", "edges", "least", "most", "graph_class"),
    [
        ("power-law", 181_629, 8, 1941, "conv-e17-d5-s5"),
        ("lognormal", 336_911, 2, 1500, "conv-e18-d6-s4"),
        ("hubs", 114_440, 8, 2000, "conv-e17-d5-s6"),
    ],
)
def test_named_graphs_have_the_degrees_of_their_law(
    name: str, edges: int, least: int, most: int, graph_class: str
) -> None:
    spec = load_graphs()[name]
    graph = build_graph(spec)
    counts = torch.bincount(graph.receiver, minlength=graph.num_nodes)
    assert (graph.num_nodes, graph.num_edges) == (4096, edges)
    assert (int(counts.min()), int(counts.max())) == (least, most)
    # Senders are the same nodes as often, and somewhere else.
    assert torch.equal(torch.bincount(graph.sender, minlength=graph.num_nodes), counts)
    assert float((graph.sender == graph.receiver).double().mean()) < 0.02
    keys = graph.receiver * graph.num_nodes + graph.sender
    assert bool((keys[1:] >= keys[:-1]).all())
    assert GraphClass.of_graph("conv", graph.receiver, graph.num_nodes).text == graph_class


def test_a_power_law_has_a_quarter_of_the_nodes_beyond_twice_the_degree() -> None:
    degrees = DegreeLaw(10_000, "power", 10, 100_000).degrees().double()
    for most, share in ((20, 0.5), (40, 0.25), (80, 0.125)):
        assert abs(float((degrees > most).double().mean()) - share) < 0.03


def test_an_equal_description_gives_an_equal_graph() -> None:
    one, same, other = (DegreeLaw(50, "lognormal", 1, 40, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one.edges(), same.edges()))
    assert not torch.equal(one.degrees(), other.degrees())
    assert torch.equal(one.degrees().sort().values, other.degrees().sort().values)
    assert DegreeLaw(1, "lognormal", 2, 8).num_edges == 4


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"nodes": 9, "law": "uniform", "least": 1, "most": 2}, "'uniform'; expected one of .*'power'"),
        ({"nodes": 9, "law": "power", "least": 3, "most": 2}, "from 3 to 2; expected at least 1"),
        ({"nodes": 9, "law": "power", "least": 3}, "missing most"),
        ({"nodes": 9, "law": "power", "least": 0, "most": 2}, "least is 0; expected a positive integer"),
        ({"nodes": 2**20, "law": "hubs", "least": 1, "most": 2**20}, "at most 1.3e[+]08 fit"),
        ({"nodes": 9, "law": "power", "least": 1, "most": 2, "seed": -1}, "seed is -1"),
    ],
)
def test_wrong_laws_say_what_is_expected(table: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        graph_from("g", {"degrees": table}, Path())


def test_the_config_of_skewed_graphs_names_them() -> None:
    graphs = {workload.graph.name for workload in load_config("skewed", "cuda").workloads}
    assert graphs == {"power-law", "lognormal", "hubs", "protein"}


def test_a_summary_says_how_far_skewed_graphs_are_from_the_floor() -> None:
    def row(name: str, graph_class: str, time_us: float) -> dict[str, Any]:
        sizes = {"label": name, "operation": "conv", "dtype": "float32", "pass": "forward", "floor_us": 10.0}
        times = {"times": {"equitune": {"time_us": time_us}, "e3nn": {"time_us": 50.0}}}
        return sizes | times | {"graph": {"name": name}, "graph_class": graph_class}

    rows = [row("hubs", "conv-e17-d5-s6", 15.0), row("protein", "conv-e15-d5", 30.0), row("water", "conv-e18-d6", 11.0)]
    floors = [line for line in summary_lines(rows) if "floor" in line]
    assert len(floors) == 2 and "on hubs (float32), forward: 1.50 (worst 1.50)" in floors[0]
    assert "on carbon and water (float32), forward: 1.10" in floors[1]
