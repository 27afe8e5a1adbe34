"""Whole models: the catalogue, structures that come with the package, and models that a function makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ase import Atoms

from autotune import paths
from autotune.errors import ConfigError
from autotune.models.package import Package, numbers_of
from autotune.models.whole_model import PACKAGES, find_atoms, models_here, open_model, published_models, structure_names

TINY = "tiny_model:tiny_model"


def test_every_published_model_names_a_package_and_a_source() -> None:
    names = {package.name for package in PACKAGES}
    models = published_models()
    assert {"mace-mp-0-small", "mace-mp-0-medium", "mace-mp-0-large", "nequip-oam-l", "sevennet-l3i5"} <= set(models)
    for model in models.values():
        assert model.package in names and len(model.source) > 10
        assert model.parameters["cutoff"] > 0


def test_a_model_takes_what_it_does_not_say_from_the_one_it_is_like(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[a]\npackage = "mace"\nsource = "s"\nx = 1\ny = 2\n[b]\nlike = "a"\ny = 3\n')
    assert published_models(path)["b"].parameters == {"x": 1, "y": 3}
    path.write_text('[a]\nlike = "b"\n[b]\nlike = "a"\n')
    with pytest.raises(ConfigError, match="like"):
        published_models(path)


def test_shipped_structures_are_read_without_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUITUNE_STRUCTURES", raising=False)
    sizes = {"imidazole": 9, "aspirin": 21, "mof": 424, "carbon": 1000, "protein": 1502, "water-box": 5184}
    assert set(sizes) <= set(structure_names())
    assert {name: len(find_atoms(name)) for name in sizes} == sizes
    shipped = {path.name.removesuffix(".xyz.gz") for path in paths.structures_dir().glob("*.xyz.gz")}
    listed = (paths.structures_dir() / "PROVENANCE.csv").read_text().splitlines()[1:]
    assert shipped == {line.split(",")[0] for line in listed}


def test_a_structure_of_the_environment_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Atoms("H2", positions=[[0, 0, 0], [0, 0, 1]]).write(tmp_path / "imidazole_9.xyz")
    monkeypatch.setenv("EQUITUNE_STRUCTURES", str(tmp_path))
    assert len(find_atoms("imidazole")) == 2


def test_a_crystal_is_displaced_and_always_alike() -> None:
    first, second = find_atoms("carbon-small"), find_atoms("carbon-small")
    assert (first.positions == second.positions).all()
    assert open_model(TINY).package.name == "tiny"
    assert abs(first.get_distance(0, 1, mic=True) - 3.567 * 3**0.5 / 4) > 1e-4


@pytest.mark.parametrize("name", ["watre", "million", "liquid2"])
def test_an_unknown_structure_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        find_atoms(name)


def test_numbers_of_elements() -> None:
    assert numbers_of("1, 6-9,35") == (1, 6, 7, 8, 9, 35)
    assert len(numbers_of("1-83, 89-94")) == 89


def test_training_gives_gradients_and_dynamics_need_none() -> None:
    model = open_model(TINY)
    inputs = model.inputs([find_atoms("imidazole")[:3]])
    model.energies_and_forces(inputs)
    assert not model.module.strength.requires_grad and not model.module.training
    loss = model.training_step(inputs)
    gradient = model.module.strength.grad.clone()
    step = 1e-3
    with torch.no_grad():
        model.module.strength[0] += step
    assert torch.allclose((model.training_step(inputs) - loss) / step, gradient[0], rtol=0.02)
    assert model.module.training


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tiny_model:nothing", "returned a str"),
        ("tiny_model:absent", "absent"),
        ("no_such_module:f", "no_such_module"),
        ("mace-mp-0-mediun", "did you mean 'mace-mp-0-medium'"),
    ],
)
def test_what_is_no_model_is_said(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        open_model(name)


def test_unknown_elements_are_named() -> None:
    with pytest.raises(ConfigError, match="does not know the elements O; it knows"):
        open_model(TINY).inputs([find_atoms("aspirin")])


def test_a_file_of_no_package_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ConfigError, match="expected a file of a model package"):
        open_model(str(path))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_missing_package_says_what_to_install(package: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(package), "modules", ("no_such_module",))
    with pytest.raises(ConfigError, match="pip install"):
        package.require()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_advice_breaks_this_environment(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("mace" in package.excludes) != (package.name == "mace")
    monkeypatch.setattr(type(package), "modules", ("no_such_module",))
    monkeypatch.setattr(type(package), "excludes", ("absent", "json"))
    with pytest.raises(ConfigError, match=r"environment of its own for it, since json, which .*-env/bin/pip install"):
        package.require()


def test_models_here_are_those_of_installed_packages() -> None:
    installed = {package.name for package in PACKAGES if package.is_installed}
    published = {name for name, model in published_models().items() if model.package in installed}
    here = models_here()
    assert published <= set(here)
    assert {Path(name).suffix for name in set(here) - published} <= {".pth"}
    assert any(name.endswith("SevenNet_MF_0/checkpoint_sevennet_mf_0.pth") for name in here) == (
        "sevennet" in installed
    )
