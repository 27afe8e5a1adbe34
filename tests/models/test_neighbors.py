"""Neighbours of moving atoms beside ASE's own list: cells of every shape, skins, and both searches."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("matscipy", reason="matscipy is not installed")

from ase.neighborlist import primitive_neighbor_list

from autotune.models.neighbors import AtomicGraph, BatchNeighbors, MatscipySearch, NeighborList, VesinSearch, search_box
from kernelgen.errors import InputError

CPU = torch.device("cpu")


def edges_of(graph: AtomicGraph) -> Counter[tuple[int, ...]]:
    rows = torch.cat([graph.centers[:, None], graph.neighbors[:, None], graph.unit_shifts.long()], dim=1)
    return Counter(map(tuple, rows.tolist()))


def edges_by_ase(positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> Counter[tuple[int, ...]]:
    """Without pairs so close to the cutoff that rounding decides on them."""
    first, second, shifts, lengths = primitive_neighbor_list("ijSd", pbc, cell, positions, cutoff + 1e-6)
    assume(not ((lengths > cutoff - 1e-6) & (lengths < cutoff + 1e-6)).any())
    return Counter(map(tuple, np.column_stack([first, second, shifts]).tolist()))


def check(graph: AtomicGraph, positions: np.ndarray, cell: np.ndarray, pbc: np.ndarray, cutoff: float) -> None:
    assert edges_of(graph) == edges_by_ase(positions, search_box(positions, cell, pbc), pbc, cutoff)
    assert (graph.centers.diff() >= 0).all()
    expected = graph.positions[graph.neighbors] + graph.unit_shifts @ graph.cell - graph.positions[graph.centers]
    torch.testing.assert_close(graph.vectors, expected, rtol=0, atol=1e-12)


@st.composite
def systems(draw: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atoms in and around a cell that may be skewed, left-handed, smaller than the cutoff or absent."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pbc = np.array(draw(st.tuples(*[st.booleans()] * 3)))
    lengths = random.uniform(1.5, 9.0, size=3)
    cell = np.diag(lengths) + draw(st.sampled_from([0.0, 0.3, 1.0])) * random.normal(size=(3, 3))
    if abs(np.linalg.det(cell)) < 0.2 * lengths.prod():
        cell = np.diag(lengths)
    if draw(st.booleans()):
        cell = cell[[1, 0, 2]]
    if not pbc.any() and draw(st.booleans()):
        cell = np.zeros((3, 3))
    positions = random.uniform(-0.7, 1.7, size=(draw(st.integers(1, 12)), 3)) @ np.diag(lengths)
    return positions, cell, pbc


@settings(max_examples=60, deadline=None)
@given(system=systems(), cutoff=st.floats(1.0, 5.0), skin=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99))
def test_edges_are_ases_however_atoms_move(system: Any, cutoff: float, skin: float, seed: int) -> None:
    positions, cell, pbc = system
    random = np.random.default_rng(seed)
    atoms = NeighborList(cutoff, CPU, skin)
    for frame in range(5):
        check(atoms.graph(positions, cell, pbc), positions, cell, pbc, cutoff)
        positions = positions + random.normal(size=positions.shape) * random.choice([0.02, 0.2])
        if frame == 3:
            cell = cell * 1.01
    assert atoms.searches <= 5


@settings(max_examples=30, deadline=None)
@given(system=systems(), cutoff=st.floats(1.0, 5.0))
def test_vesins_search_finds_what_matscipys_does(system: Any, cutoff: float) -> None:
    """On the CPU, where it can run too; NeighborList takes it on a GPU."""
    pytest.importorskip("vesin_torch", reason="vesin-torch is not installed")
    positions, cell, pbc = system
    assert_searches_agree(positions, cell, pbc, cutoff, CPU)


def assert_searches_agree(positions: Any, cell: Any, pbc: Any, cutoff: float, device: torch.device) -> None:
    box = search_box(positions, cell, pbc)
    by_vesin, by_matscipy = (
        Counter(map(tuple, torch.column_stack([*pairs[:2], pairs[2].long()]).tolist()))
        for pairs in (
            VesinSearch(cutoff)(positions, box, pbc, device),
            MatscipySearch(cutoff)(positions, box, pbc, CPU),
        )
    )
    assert by_vesin == by_matscipy


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(system=systems(), cutoff=st.floats(1.0, 5.0))
def test_vesins_search_on_a_gpu_finds_what_matscipys_does(system: Any, cutoff: float) -> None:
    assert_searches_agree(*system, cutoff, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1.2, 2.0, 40.0])
def test_vesins_search_on_a_gpu_of_dense_and_of_large_cells(width: float) -> None:
    """One atom with some thousand neighbours, and 6,000 atoms."""
    positions = np.random.default_rng(0).uniform(0, width, size=(1 if width < 10 else 6000, 3))
    assert_searches_agree(positions, width * np.eye(3), np.array([True] * 3), 7.0, torch.device("cuda"))


def cube() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    positions = np.random.default_rng(0).uniform(0, 10, size=(60, 3))
    return positions, 10 * np.eye(3), np.array([True] * 3)


def test_a_search_is_made_when_an_atom_has_moved_by_half_the_skin() -> None:
    positions, cell, pbc = cube()
    atoms = NeighborList(3.0, CPU, skin=1.0)
    for way, searches in ((0.0, 1), (0.2, 1), (0.499, 1), (0.501, 2), (0.9, 2), (1.1, 3)):
        moved = positions.copy()
        moved[7, 1] += way
        check(atoms.graph(moved, cell, pbc), moved, cell, pbc, 3.0)
        assert atoms.searches == searches, way
    assert copy.deepcopy(atoms).searches == pickle.loads(pickle.dumps(atoms)).searches == 0


def test_two_atoms_that_approach_each_other_by_half_the_skin_each_are_found() -> None:
    positions, cell, pbc = np.array([[0.0, 0, 0], [3.8, 0, 0]]), np.zeros((3, 3)), np.array([False] * 3)
    atoms = NeighborList(3.0, CPU, skin=1.0)
    assert len(atoms.graph(positions, cell, pbc).centers) == 0
    closer = positions + np.array([[0.45, 0, 0], [-0.45, 0, 0]])
    check(atoms.graph(closer, cell, pbc), closer, cell, pbc, 3.0)
    assert len(atoms.graph(closer, cell, pbc).centers) == 2 and atoms.searches == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.003, 0.03, 0.1]), follows=st.booleans())
def test_a_cell_that_changes_is_followed_while_the_skin_lasts(seed: int, size: float, follows: bool) -> None:
    random = np.random.default_rng(seed)
    positions, cell, pbc = cube()
    atoms = NeighborList(3.0, CPU, skin=1.0)
    for _ in range(6):
        strain = np.eye(3) + size * random.normal(size=(3, 3))
        cell = cell @ strain
        positions = (positions @ strain if follows else positions) + 0.02 * random.normal(size=positions.shape)
        check(atoms.graph(positions, cell, pbc), positions, cell, pbc, 3.0)
    assert not (follows and size == 0.003) or atoms.searches == 1


def test_a_cell_may_shrink_as_far_as_the_skin_allows() -> None:
    """By a quarter with all its atoms: pairs 4 apart are 3 apart then, and the cutoff is 3."""
    positions, cell, pbc = cube()
    atoms = NeighborList(3.0, CPU, skin=1.0)
    for factor, searches in ((1.0, 1), (1.3, 1), (0.76, 1), (0.74, 2)):
        check(atoms.graph(factor * positions, factor * cell, pbc), factor * positions, factor * cell, pbc, 3.0)
        assert atoms.searches == searches, factor


@pytest.mark.parametrize("where", ["atom 3", "the cell"])
def test_what_is_not_finite_is_refused(where: str) -> None:
    positions, cell, pbc = cube()
    (cell if where == "the cell" else positions[3:])[0, 1] = np.inf
    with pytest.raises(InputError, match=f"a coordinate of {where} is not finite"):
        NeighborList(3.0, CPU).graph(positions, cell, pbc)


def test_a_periodic_direction_needs_a_vector() -> None:
    positions, cell, pbc = cube()
    for flat in (np.zeros((3, 3)), cell[[0, 0, 2]]):
        with pytest.raises(InputError, match="has no volume along its periodic directions"):
            NeighborList(3.0, CPU).graph(positions, flat, pbc)
    with pytest.raises(InputError, match="neighbours are searched on cpu, cuda, not on meta"):
        NeighborList(3.0, torch.device("meta"))


@settings(max_examples=60, deadline=None)
@given(st.lists(systems(), min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.floats(1.0, 5.0))
def test_a_batchs_edges_are_its_systems(batch: list[Any], seed: int, cutoff: float) -> None:
    """While all atoms move, and one system's cell follows: the edges that each system has alone."""
    random = np.random.default_rng(seed)
    pbc = np.logical_and.reduce([pbc for _, _, pbc in batch])
    sizes = [len(positions) for positions, _, _ in batch]
    frames = [[positions, search_box(positions, cell, pbc) if pbc.any() else cell] for positions, cell, _ in batch]
    neighbors = BatchNeighbors(cutoff, CPU)
    system = torch.arange(len(batch)).repeat_interleave(torch.tensor(sizes))
    for _ in range(5):
        for frame in frames:
            frame[0] = frame[0] + 0.15 * random.normal(size=frame[0].shape)
        strained, strain = frames[random.integers(len(frames))], np.eye(3) + 0.03 * random.normal(size=(3, 3))
        strained[0], strained[1] = strained[0] @ strain, strained[1] @ strain
        positions, cells = np.concatenate([at for at, _ in frames]), np.stack([cell for _, cell in frames])
        graph = neighbors.graph(torch.from_numpy(positions), torch.from_numpy(cells), pbc, system, sizes)
        expected: Counter[tuple[int, ...]] = Counter()
        for (at, cell), start in zip(frames, np.cumsum([0, *sizes]), strict=False):
            alone = edges_by_ase(at, search_box(at, cell, pbc), pbc, cutoff)
            expected.update({(a + start, b + start, *shifts): count for (a, b, *shifts), count in alone.items()})
        assert edges_of(graph) == expected
        assert neighbors.searches <= 5 * len(batch)
