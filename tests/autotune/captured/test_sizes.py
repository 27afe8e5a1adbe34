"""Sizes to which graphs are padded, and buffers that are filled again and again."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.models import padding as volumes
from autotune.models.padding import (
    Counts,
    Field,
    PaddedStep,
    VolumesByProducts,
    best_fit,
    fits,
    ghost_atoms,
    ghost_ends,
    ghost_ends_there,
    ghost_pointer,
    padded_size,
    step_above,
)

CPU = torch.device("cpu")
counts = st.builds(Counts, st.integers(1, 10**6), st.integers(0, 10**7), st.integers(1, 9))
growths = st.floats(1.05, 3.0)


@given(counts, growths)
def test_a_size_has_room_for_its_graph_and_for_ghosts(real: Counts, growth: float) -> None:
    size = padded_size(real, growth)
    assert fits(real, size)
    assert size.edges <= growth * max(real.edges, 16) + 8
    # No ghost has many times the edges of a real atom.
    mean = max(1, -(-real.edges // real.atoms))
    assert (size.edges - real.edges) / (size.atoms - real.atoms) <= 4 * mean
    assert best_fit(real, [size], growth) == size


@pytest.mark.parametrize(
    ("real", "size"),
    [
        (Counts(1000, 157_894, 1), Counts(1112, 159_096, 2)),  # diamond: 8 ghosts of 150 edges, not 112 of 11
        (Counts(10, 30, 2), Counts(40, 200, 3)),
        (Counts(3, 0, 1), Counts(16, 16, 2)),
    ],
)
def test_ghosts_with_edges_have_as_many_as_real_atoms(real: Counts, size: Counts) -> None:
    """A block of a convolution with many atoms of few edges would be the last one to be ready."""
    ends = ghost_ends(real, size, CPU)
    assert len(ends) == size.edges - real.edges and bool((ends[1:] >= ends[:-1]).all())
    assert real.atoms <= int(ends[0]) and int(ends[-1]) < size.atoms
    each = torch.bincount(ends - real.atoms)
    mean, most = real.edges / real.atoms, size.atoms - real.atoms
    wanted = max(mean, (size.edges - real.edges) / most)
    assert len(each) == 1 or (each >= 0.5 * wanted - 1).all() and (each <= 2 * wanted + 1).all()


@given(st.builds(Counts, st.integers(1, 100), st.integers(0, 500), st.just(1)), growths)
def test_ghosts_are_where_the_host_puts_them_if_only_the_device_knows_the_numbers(real: Counts, growth: float) -> None:
    size = padded_size(real, growth)
    found = ghost_ends_there(torch.tensor(real.atoms), torch.tensor(real.edges), size, torch.arange(size.edges))
    assert found[real.edges :].tolist() == ghost_ends(real, size, CPU).tolist()


@given(st.integers(41_000, 10**7), growths)
def test_large_graphs_are_padded_little(count: int, growth: float) -> None:
    assert step_above(count, growth) <= max(growth**0.25 * count + 16, 32768 * growth + 16)


@given(st.integers(0, 10**7), growths)
def test_steps_are_few_and_do_not_depend_on_where_one_starts(count: int, growth: float) -> None:
    step = step_above(count, growth)
    assert step >= count and step % 8 == 0
    assert step_above(step, growth) == step


def test_a_captured_size_serves_smaller_graphs_but_not_much_smaller_ones() -> None:
    sizes = [padded_size(Counts(atoms, 20 * atoms, 1), 1.25) for atoms in (100, 1000)]
    assert best_fit(Counts(90, 1800, 1), sizes, 1.25) == sizes[0]
    assert best_fit(Counts(900, 18000, 1), sizes, 1.25) == sizes[1]
    assert best_fit(Counts(300, 6000, 1), sizes, 1.25) is None
    assert best_fit(Counts(2000, 40000, 1), sizes, 1.25) is None
    assert best_fit(Counts(90, 1800, 2), sizes, 1.25) is None, "the number of structures is exact"


def test_of_several_sizes_the_smallest_serves() -> None:
    small, wide, long = Counts(112, 2400, 2), Counts(136, 2400, 2), Counts(112, 2800, 2)
    for sizes in itertools.permutations((small, wide, long)):
        assert best_fit(Counts(90, 1800, 1), sizes, 1.25) == small
    assert best_fit(Counts(90, 1800, 1), (long, wide), 1.25) == wide, "edges count first"


def test_the_ghosts_structure_ends_with_the_last_atom() -> None:
    real, size = Counts(10, 30, 2), Counts(40, 200, 3)
    assert ghost_atoms(real, size, CPU).tolist() == [30] and ghost_pointer(real, size, CPU).tolist() == [40]


def fields_of(real: Counts) -> dict[str, Field]:
    generator = torch.Generator().manual_seed(real.edges)
    edges = torch.randint(real.atoms, (2, real.edges), generator=generator)
    return {
        "positions": Field(torch.randn(real.atoms, 3, generator=generator), "atoms", 0.0, each=(3,)),
        "elements": Field(torch.ones(real.atoms, 2), "atoms", torch.tensor([1, 0]), each=(2,)),
        "edge_index": Field(edges, "edges", ghost_ends, axis=1, each=(2,)),
        "cell": Field(torch.randn(3 * real.graphs, 3, generator=generator), "graphs", torch.eye(3), rows=3, each=(3,)),
        "ptr": Field(torch.arange(real.graphs + 1), "graphs", ghost_pointer, extra=1),
    }


SIZE = Counts(40, 200, 3)


def step() -> PaddedStep:
    return PaddedStep(SIZE, fields_of(Counts(10, 30, 2)), CPU, lambda given, size: dict(given), {"positions": "atoms"})


def test_buffers_of_changing_graphs_hold_what_fresh_ones_hold() -> None:
    used = step()
    for real in (Counts(10, 30, 2), Counts(39, 200, 2), Counts(10, 31, 2), Counts(10, 31, 2), Counts(11, 31, 2)):
        used(fields_of(real), real)
        fresh = step()
        fresh(fields_of(real), real)
        for name, buffer in used.buffers.items():
            assert torch.equal(buffer, fresh.buffers[name]), (name, real)
        edges, given = used.buffers["edge_index"], fields_of(real)["edge_index"].tensor
        assert torch.equal(edges[:, : real.edges], given)
        ghosts = edges[:, real.edges :]
        assert ghosts.numel() == 0 or (int(ghosts.min()) >= real.atoms and int(ghosts.max()) < SIZE.atoms)
        assert used.buffers["ptr"].tolist() == [0, 1, 2, 40]
        assert torch.equal(used.buffers["cell"][-3:], torch.eye(3))


def test_results_are_the_callers_own() -> None:
    used, real = step(), Counts(10, 30, 2)
    first = used(fields_of(real), real)["positions"]
    before = first.clone()
    used({**fields_of(real), "positions": Field(torch.zeros(10, 3), "atoms", 0.0, each=(3,))}, real)
    assert first.shape == (10, 3) and torch.equal(first, before)


@pytest.mark.parametrize("det", [torch.linalg.det, torch.det, torch.Tensor.det])
def test_determinants_of_cells(det, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    used = []
    product = volumes.triple_product
    monkeypatch.setattr(volumes, "triple_product", lambda cell: used.append(1) or product(cell))
    cells = torch.randn(5, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with VolumesByProducts():
        found = det(cells)
    assert used == [1]
    torch.testing.assert_close(found, torch.linalg.det(cells), rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(value.sum(), cells, retain_graph=True)[0] for value in (found, det(cells))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    with VolumesByProducts():
        assert det(torch.eye(2) * 2) == 4
        torch.testing.assert_close(det(cells[0]), found[0])


@pytest.mark.gpu
def test_a_captured_step_replays_and_is_counted() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def compute(given: dict[str, torch.Tensor], size: Counts) -> dict[str, torch.Tensor]:
        sender, receiver = given["edge_index"]
        moved = given["positions"].requires_grad_()
        energies = torch.zeros_like(moved).index_add(0, receiver, moved[sender] ** 2).sum(1)
        (forces,) = torch.autograd.grad(energies.sum(), moved)
        return {"energies": energies, "forces": forces}

    used = PaddedStep(SIZE, fields_of(Counts(10, 30, 2)), device, compute, {"energies": "atoms", "forces": "atoms"})
    for real in (Counts(10, 30, 2), Counts(39, 199, 2), Counts(9, 31, 2)):
        fields = fields_of(real)
        found = used(fields, real)
        wanted = compute({name: field.tensor.cuda() for name, field in fields.items()}, real)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-5)
    assert used.replays == 3
