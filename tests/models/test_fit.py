"""The tool that fits students to a teacher's labels: what it says of them, and that ways differ in rounding alone."""

from __future__ import annotations

import copy
from typing import Any

import fit
import numpy as np
import pytest
import torch
from model_cases import needs

from autotune.models.capture import Real

of_both = pytest.mark.parametrize("student", [pytest.param(one, marks=needs(one)) for one in fit.STUDENTS])
SMALL = {
    "mace": {"hidden_irreps": "8x0e + 8x1o", "max_ell": 2, "correlation": 2},
    "nequip": {"num_layers": 2, "num_features": 8, "l_max": 1},
}


def runs(way: str, energies: list[float], forces: list[float]) -> list[dict[str, Any]]:
    pairs = enumerate(zip(energies, forces, strict=True))
    return [
        {"way": way, "seed": seed, "ms_a_step": 1.0, "validation": dict(zip(fit.JUDGED, pair, strict=True))}
        for seed, pair in pairs
    ]


STOCK = runs("stock", [2.0, 3.0, 4.0], [50.0, 60.0, 70.0])


@pytest.mark.parametrize(
    ("energies", "forces", "said"),
    [
        ([2.1, 2.9, 3.9], [51.0, 61.0, 72.0], "within"),
        ([4.1, 4.2, 4.0], [51.0, 61.0, 72.0], "outside: energies +36.7%"),
        ([3.0, 3.0, 3.0], [10.0, 10.0, 10.0], "outside: forces -83.3%"),
        ([3.0, 3.0, float("nan")], [51.0, 61.0, 72.0], "outside: energies +nan%"),
        ([3.0, 3.0], [60.0, 60.0], "not the seeds of stock"),
    ],
)
def test_the_summary_says_what_is_outside_of_stocks_seeds(
    energies: list[float], forces: list[float], said: str
) -> None:
    baseline = dict.fromkeys(fit.JUDGED, 100.0)
    record = {
        "student": "mace",
        "device": "a GPU",
        "baseline": baseline,
        "runs": STOCK + runs("equitune", energies, forces),
    }
    *_, stock, ours = fit.summary([record])
    assert "3.00 (2.00 to 4.00)" in stock and ours.endswith(f"| {said} |")


def test_failed_runs_are_told() -> None:
    failed = [*runs("captured", [3.0, 3.0], [60.0, 60.0]), {"way": "captured", "seed": 2, "failed": "RuntimeError: no"}]
    assert fit.judged(failed, STOCK) == "1 of 3 failed"
    assert fit.judged(STOCK, failed) == "fewer than three seeds of stock"


def test_the_end_of_each_trajectory_is_for_validation() -> None:
    learned, others = fit.read_frames()
    trajectories = sum(len(temperatures) for temperatures, _ in fit.SYSTEMS.values())
    assert len(learned.atoms) == 4 * len(others.atoms) == trajectories * fit.SAMPLED * 4 // 5
    for frames in (learned, others):
        counts = np.array([len(atoms) for atoms in frames.atoms])
        assert [len(forces) for forces in frames.forces] == list(counts)
        assert np.abs(frames.energy / counts).max() < 0.5  # eV an atom; with them it is 4 to 10


def small(student: str, monkeypatch: pytest.MonkeyPatch, size: int) -> tuple[Any, list[fit.Batch]]:
    """A student in float64, and batches of frames of each system."""
    published, smaller = fit.STUDENTS[student]
    monkeypatch.setitem(fit.STUDENTS, student, (published, smaller | SMALL[student]))
    frames = fit.read_frames()[0].chosen([0, 40, 60, 120])
    model = fit.build(student, frames, 0, "float64", "cpu")
    return model, fit.batches_of(model, frames, size, 0)


@pytest.mark.slow
@of_both
def test_losses_are_those_of_the_package(student: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small(student, monkeypatch, 4)
    labels, counts = batches[0].labels, batches[0].labels["atoms"].long()
    draw = torch.Generator().manual_seed(0)
    energy, forces = (torch.randn(labels[name].shape, generator=draw).double() for name in ("energy", "forces"))
    found = fit.loss_of(student, energy, forces, labels, Real(torch.ones(len(forces)), 4))
    if student == "mace":
        from mace.modules import WeightedEnergyForcesLoss
        from mace.tools.torch_geometric import Batch

        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)])
        weights = {name: torch.ones(4) for name in ("weight", "energy_weight", "forces_weight")}
        given = Batch(energy=labels["energy"], forces=labels["forces"], ptr=ends, **weights)
        wanted = WeightedEnergyForcesLoss(*fit.WEIGHTS[student])(given, {"energy": energy, "forces": forces})
    else:
        from nequip.train import EnergyForceLoss

        of_energy, of_forces = fit.WEIGHTS[student]
        loss = EnergyForceLoss(coeffs={"total_energy": of_energy, "forces": of_forces}).double()
        sizes = {"num_atoms": counts, "pos": forces, "batch": torch.arange(4).repeat_interleave(counts)}
        given = {"total_energy": labels["energy"][:, None], "forces": labels["forces"], **sizes}
        metrics = loss({"total_energy": energy[:, None], "forces": forces, **sizes}, given)
        wanted = metrics["weighted_sum"] * (of_energy + of_forces)  # it makes its weights sum to one
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.slow
@of_both
def test_all_ways_learn_alike_in_float64(student: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, batches = small(student, monkeypatch, 2)
    found = {}
    for way in ("stock", "equitune", "captured"):
        model = stock.with_module(copy.deepcopy(stock.module))
        weights, about = fit.learn(model, way, batches, 6, 0)
        assert all(weight.grad is None for weight in stock.module.parameters())
        found[way] = torch.tensor(about["losses"], dtype=torch.float64), weights
    losses, weights = found.pop("stock")
    assert len(losses.unique()) == len(losses)  # of a batch too, since the weights changed
    for way, (others, theirs) in found.items():
        torch.testing.assert_close(others, losses, rtol=1e-10, atol=0, msg=lambda text, way=way: f"{way}: {text}")
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-7, atol=1e-9, msg=f"{way}: {name}")
