"""Graphs: published structures give their known numbers of edges, in order; neighbours agree with a direct search."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from places import ROOT

from autotune.errors import ConfigError
from autotune.workload import graphs
from autotune.workload.config import find_problem, graph_from, load_config, load_graphs
from autotune.workload.graphs import (
    GivenEdges,
    GraphSpec,
    Points,
    RandomNeighbours,
    StructureFile,
    Water,
    build_graph,
    neighbours,
)
from autotune.workload.workload import GraphClass, Restriction, Workload, make_tensors
from kernelgen.device import DeviceFacts, cuda_facts

H200, HOST = cuda_facts("sm_90", "NVIDIA H200", 132), DeviceFacts("cpu", "Test CPU 4 cores", "x86_64", 4)
STRUCTURES = ROOT.parent / "shared" / "structures"
MANIFEST = list(csv.DictReader((STRUCTURES / "manifest.csv").open())) if (STRUCTURES / "manifest.csv").exists() else []


def degrees(name: str) -> tuple[int, int, int, int]:
    graph = build_graph(load_graphs()[name])
    counts = torch.bincount(graph.receiver, minlength=graph.num_nodes)
    return graph.num_nodes, graph.num_edges, int(counts.min()), int(counts.max())


def test_mof_and_carbon_have_their_known_sizes() -> None:
    assert degrees("mof") == (424, 11872, 20, 52)
    assert degrees("carbon") == (1000, 158000, 158, 158)


@pytest.mark.parametrize("name", ["mof", "carbon-small", "molecule", "liquid-small"])
def test_edges_are_sorted_symmetric_and_of_the_stated_length(name: str) -> None:
    spec = load_graphs()[name]
    graph = build_graph(spec)
    keys = graph.receiver * graph.num_nodes + graph.sender
    assert bool((keys[1:] >= keys[:-1]).all())
    lengths = graph.vectors.norm(dim=1)
    assert float(lengths.min()) > 0 and float(lengths.max()) < spec.cutoff
    assert graph.sender.dtype == graph.receiver.dtype == torch.int64
    forward = np.lexsort((*np.round(graph.vectors.numpy().T, 6), graph.sender, graph.receiver))
    back = np.lexsort((*np.round(-graph.vectors.numpy().T, 6), graph.receiver, graph.sender))
    np.testing.assert_array_equal(graph.sender[forward], graph.receiver[back])
    np.testing.assert_array_equal(graph.receiver[forward], graph.sender[back])


def by_brute_force(positions: np.ndarray, cell: np.ndarray, periodic: np.ndarray, cutoff: float) -> set:
    """Every pair and image within 4 cells, without a tree."""
    found = set()
    spans = [range(-4, 5) if p else range(1) for p in periodic]
    for step in itertools.product(*spans):
        shifted = positions + np.array(step) @ cell
        distance = np.linalg.norm(positions[:, None] - shifted[None, :], axis=-1)
        for i, j in zip(*np.nonzero(distance < cutoff), strict=True):
            if i != j or any(step):
                found.add((int(i), int(j), *np.round(positions[i] - shifted[j], 6)))
    return found


@pytest.mark.parametrize("periodic", [(True, True, True), (True, False, True), (False, False, False)])
def test_neighbours_agree_with_a_direct_search(periodic: tuple[bool, bool, bool]) -> None:
    rng = np.random.default_rng(3)
    cell = np.array([[3.1, 0.0, 0.0], [0.9, 2.8, 0.0], [-0.4, 0.7, 3.3]])
    positions = rng.uniform(-1.0, 2.0, (7, 3)) @ cell
    receiver, sender, vectors = neighbours(positions, cell, np.array(periodic), 4.0)
    found = {(int(r), int(s), *np.round(v, 6)) for r, s, v in zip(receiver, sender, vectors, strict=True)}
    assert len(found) == len(receiver)
    assert found == by_brute_force(positions, cell, np.array(periodic), 4.0)


def test_lone_atom_sees_its_images_but_not_itself() -> None:
    receiver, sender, vectors = neighbours(np.zeros((1, 3)), 2.0 * np.eye(3), np.array([True] * 3), 2.5)
    assert receiver.tolist() == sender.tolist() == [0] * 6
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 2.0)


def test_points_are_the_same_every_time_and_depend_on_the_seed() -> None:
    first, again, other = (Points(20, 0.1, seed).atoms().get_positions() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


@pytest.mark.skipif(not MANIFEST, reason="needs the structures beside the project")
@pytest.mark.parametrize("row", MANIFEST, ids=lambda row: row["name"])
def test_structures_have_the_edges_of_their_manifest(row: dict[str, str]) -> None:
    source = StructureFile(row["name"] + ".xyz", str(STRUCTURES))
    graph = build_graph(GraphSpec(row["name"], source, float(row["cutoff_A"])))
    assert (graph.num_nodes, graph.num_edges) == (int(row["atoms"]), int(row["edges"]))


@pytest.mark.skipif(not MANIFEST, reason="needs the structures beside the project")
def test_mof_is_the_published_structure() -> None:
    ours = load_graphs()["mof"].source.atoms()
    theirs = StructureFile("mof5_424.xyz", str(STRUCTURES)).atoms()
    assert sorted(ours.symbols) == sorted(theirs.symbols)
    for symbol in ("Zn", "O", "C", "H"):
        one, two = (
            {tuple(row) for row in np.round(a.get_scaled_positions(), 3) % 1.0}
            for a in (select(ours, symbol), select(theirs, symbol))
        )
        assert one == two


def select(atoms, symbol: str):
    return atoms[[atom.symbol == symbol for atom in atoms]]


def test_structure_file_is_found_in_the_environment_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("config", "environment"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.xyz").write_text("1\n\nH 0 0 0\n")
    source = StructureFile("a.xyz", str(tmp_path / "config"))
    assert source.find() == tmp_path / "config" / "a.xyz"
    monkeypatch.setenv("EQUITUNE_STRUCTURES", str(tmp_path / "environment"))
    assert source.find() == tmp_path / "environment" / "a.xyz"
    with pytest.raises(ConfigError, match="EQUITUNE_STRUCTURES"):
        StructureFile("b.xyz", str(tmp_path)).find()


def test_graph_class() -> None:
    mof = GraphClass.of("conv", 11872, 424)
    assert mof.text == "conv-e14-d5" and GraphClass.parse("conv-e14-d5") == mof
    assert GraphClass.of("plain", 65536, 7).text == "plain-e16"
    assert GraphClass.parse("plain-e16") == GraphClass("plain", 16)
    assert mof.distance(GraphClass("conv", 17, 7)) == 5
    assert mof.distance(GraphClass("plain", 14)) == float("inf")
    assert GraphClass.of("conv", 0, 0).text == "conv-e0-d0"
    for wrong in ("conv-e14", "plain-e3-d2", "edges", "plain-e3-s4", "conv-e3-s4"):
        with pytest.raises(ConfigError, match="expected for example"):
            GraphClass.parse(wrong)
    with pytest.raises(ConfigError, match="operation"):
        GraphClass.of("fused", 1, 1)


def test_the_nodes_of_a_graph_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a bench asks for the class of its graph many times."""
    counted: list[int] = []
    of_graph = GraphClass.of_graph

    def counting(operation: str, receiver: torch.Tensor, num_nodes: int) -> GraphClass:
        counted.append(num_nodes)
        return of_graph(operation, receiver, num_nodes)

    monkeypatch.setattr(GraphClass, "of_graph", counting)
    problem, spec = find_problem("tiny"), GraphSpec("counted", Points(37, 0.1), 4.0)
    conv, plain = (Workload("tiny", problem, operation, spec) for operation in ("conv", "plain"))
    assert [conv.graph_class().text, conv.graph_class().text, conv.identity("forward")[5]] == ["conv-e10-d5"] * 3
    assert plain.graph_class().text == "plain-e10" and counted == [37]


def by_degrees(degrees: list[int]) -> torch.Tensor:
    """Receivers, shuffled."""
    receiver = torch.repeat_interleave(torch.arange(len(degrees)), torch.tensor(degrees))
    return receiver[torch.randperm(len(receiver), generator=torch.Generator().manual_seed(0))]


POWER_LAW = [int(min(2000, 8 * (4000 / (place + 1)) ** 0.8)) for place in range(4000)]
SKEWED = {
    "power law": (POWER_LAW, "-s6", True),
    "hub": ([32] * 4000 + [20000], "-s9", True),
    # Longest first, nodes of 400 edges end before the many others do.
    "bimodal": ([20] * 3600 + [400] * 400, "", False),
    "regular": ([158] * 1000, "", False),
}


@pytest.mark.parametrize("name", SKEWED)
def test_a_graph_class_sees_nodes_that_a_gpu_would_wait_for(name: str) -> None:
    degrees, skew, waits = SKEWED[name]
    found = GraphClass.of_graph("conv", by_degrees(degrees), len(degrees))
    even = GraphClass.of("conv", sum(degrees), len(degrees))
    assert found.text == even.text + skew and GraphClass.parse(found.text) == found
    assert found.waits_for_longest(H200) is waits and not found.waits_for_longest(HOST)
    assert found.distance(even) == found.log2_skew
    # One multiprocessor has all other edges to do meanwhile.
    assert not found.waits_for_longest(dataclasses.replace(H200, units=1))
    ghosts = GraphClass.of_graph("conv", by_degrees(degrees), 10 * len(degrees))
    assert ghosts.log2_skew == found.log2_skew, "nodes without edges do not make a mean node shorter"
    assert GraphClass.of_graph("conv", by_degrees([10] * 100 + [500]), 101).log2_skew == 0, "small"


@pytest.mark.parametrize(("longest", "skew"), [(159, 0), (161, 3), (319, 3), (323, 4)])
def test_skew_is_rounded_down(longest: int, skew: int) -> None:
    """A mean node has 20 edges and a little."""
    degrees = [20] * 4000 + [longest]
    assert GraphClass.of_graph("conv", by_degrees(degrees), 4001).log2_skew == skew


@pytest.mark.parametrize("name", ["aspirin", "carbon", "mof", "liquid"])
def test_graphs_of_the_suite_have_no_skew(name: str) -> None:
    graph = build_graph(load_graphs()[name])
    assert GraphClass.of_graph("conv", graph.receiver, graph.num_nodes).log2_skew == 0


@pytest.mark.parametrize(
    ("cutoff", "repeat", "said"),
    [
        (1e9, (1, 1, 1), "periodic images of atoms"),
        (1e308, (1, 1, 1), "periodic images of atoms"),
        (130.0, (1, 1, 1), "edges"),
        (float("inf"), (1, 1, 1), "must be positive and finite"),
        (5.0, (10**6, 10**6, 10**6), "atoms"),
    ],
)
def test_a_graph_that_no_memory_would_hold_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, cutoff: float, repeat: tuple[int, int, int], said: str
) -> None:
    monkeypatch.setattr(graphs, "MOST_EDGES", 10**5)
    with pytest.raises(ConfigError, match=f"'dense'.*{said}"):
        build_graph(GraphSpec("dense", Points(20, 0.1), cutoff, repeat))


def test_a_limit_lets_through_what_fits() -> None:
    rng = np.random.default_rng(0)
    cell, periodic = 10.0 * np.eye(3), np.array([True] * 3)
    positions = rng.uniform(0.0, 10.0, (20, 3))
    number = len(neighbours(positions, cell, periodic, 8.0)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "MOST_EDGES", number + len(positions))  # each atom is its own neighbour until the end
        assert len(neighbours(positions, cell, periodic, 8.0)[0]) == number
        patch.setattr(graphs, "MOST_EDGES", number - 1)
        with pytest.raises(ConfigError, match="edges"):
            neighbours(positions, cell, periodic, 8.0)


def test_a_periodic_cell_without_volume_is_refused() -> None:
    with pytest.raises(ConfigError, match="no volume"):
        neighbours(np.zeros((1, 3)), np.zeros((3, 3)), np.array([True] * 3), 2.5)


@pytest.mark.parametrize(("nodes", "edges"), [(424, 11872), (40, 701), (3, 60), (1, 8), (500, 3)])
def test_random_neighbours_have_exactly_their_size(nodes: int, edges: int) -> None:
    graph = build_graph(GraphSpec("random", RandomNeighbours(nodes, edges)))
    assert (graph.num_nodes, graph.num_edges, len(graph.vectors)) == (nodes, edges, edges)
    assert int(graph.receiver.max()) < nodes and int(graph.sender.max()) < nodes
    assert bool((graph.receiver.diff() >= 0).all())
    again = RandomNeighbours(nodes, edges).edges()
    assert np.array_equal(np.sort(again[0]), graph.receiver.numpy()), "the same at every call"


def test_random_neighbours_are_the_nearest() -> None:
    source = RandomNeighbours(200, 4000)
    lengths = np.linalg.norm(source.edges()[2], axis=1)
    more = np.linalg.norm(RandomNeighbours(200, 5000).edges()[2], axis=1)
    assert np.allclose(np.sort(more)[:4000], np.sort(lengths))


def test_given_edges_come_back_sorted_and_survive_a_pickle() -> None:
    graph = build_graph(GraphSpec("random", RandomNeighbours(40, 700)))
    order = torch.randperm(700, generator=torch.Generator().manual_seed(0))
    source = GivenEdges.of(graph.sender[order].int(), graph.receiver[order], 40)
    assert source == GivenEdges.of(graph.sender, graph.receiver, 40) == pickle.loads(pickle.dumps(source))
    assert source != GivenEdges.of(graph.sender[1:], graph.receiver[1:], 40)
    assert source != GivenEdges.of(graph.sender, graph.receiver, 41)
    built = build_graph(GraphSpec("given", pickle.loads(pickle.dumps(source))))
    assert torch.equal(built.sender, graph.sender) and torch.equal(built.receiver, graph.receiver)
    assert (built.num_nodes, built.vectors.shape) == (40, (700, 3))
    ghosts = GivenEdges.of(torch.tensor([0, 5, 4]), torch.tensor([0, 1, 1]), 3).edges()
    assert [part.tolist() for part in ghosts] == [[0, 1, 2], [0, 1, 1]], "senders beyond the nodes wrap around"


def test_a_box_of_water_has_the_liquids_density_and_whole_molecules() -> None:
    graph = load_graphs()["water-box"]
    atoms = graph.source.atoms()  # type: ignore[union-attr]
    assert atoms.get_chemical_symbols() == ["O", "H", "H"] * 12**3 and atoms.pbc.all()
    grams = atoms.get_masses().sum() / 6.02214076e23
    assert grams / (atoms.get_volume() * 1e-24) == pytest.approx(0.997, abs=0.003)
    for oxygen in (0, 3 * 700, 3 * 1727):
        assert atoms.get_angle(oxygen + 1, oxygen, oxygen + 2) == pytest.approx(104.52)
        assert atoms.get_distances(oxygen, [oxygen + 1, oxygen + 2]) == pytest.approx([0.9572] * 2)
    again, other = Water(2, seed=1).atoms().positions, Water(2, seed=2).atoms().positions
    assert np.array_equal(again, Water(2, seed=1).atoms().positions) and not np.allclose(again, other)
    # Turned by rotations, not mirrored, and each molecule by another one.
    assert len({tuple(np.round(again[3 * n + 1] - again[3 * n], 3)) for n in range(8)}) == 8


def test_a_box_of_water_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="side"):
        graph_from("w", {"cutoff": 6.0, "water": {"seed": 0}}, Path())
    with pytest.raises(ConfigError, match=r"water.seed is -1; expected an integer that is not negative"):
        graph_from("w", {"cutoff": 6.0, "water": {"side": 2, "seed": -1}}, Path())


@pytest.mark.parametrize("operation", ["conv", "plain"])
def test_a_convolution_has_a_row_for_each_node_and_a_plain_product_for_each_edge(operation: str) -> None:
    (work,) = load_config("quick", "cpu").workloads[:1]
    work = dataclasses.replace(work, operation=operation)
    graph, tensors = build_graph(work.graph), make_tensors(work, "cpu")
    assert graph.num_nodes != graph.num_edges
    rows = graph.num_nodes if operation == "conv" else graph.num_edges
    assert (len(tensors.x), len(tensors.g), len(tensors.y)) == (rows, rows, graph.num_edges)


def test_choices_of_a_direction_replace_the_common_ones() -> None:
    given = Restriction({"threads": (1, 2), "layout": (0,)}, {"forward": {"threads": (4,)}})
    assert given.choices("forward") == {"threads": (4,), "layout": (0,)}
    assert given.choices("backward") == {"threads": (1, 2), "layout": (0,)}
