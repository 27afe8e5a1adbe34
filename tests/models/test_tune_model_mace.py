"""``equitune tune model`` with a file of MACE: what is recorded, and what a wrong structure or file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

import ase.build
from mace_cases import imidazole, model_of, numbers_in

from autotune.errors import ConfigError
from autotune.models.accelerate import accelerate
from autotune.tune.model_passes import ENERGIES, TRAINING, Loaded, Recording, open_named, places_of, recorded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's file in float32, and the structure of a molecule."""
    torch.save(model_of(numbers_in(imidazole()), dtype=torch.float32), tmp_path / "my.model")
    imidazole().write(tmp_path / "box.xyz")
    return tmp_path


def recording_of(folder: Path, dtype: str | None = None) -> tuple[Recording, set[str]]:
    opened = open_named(str(folder / "my.model"), str(folder / "box.xyz"), "cpu", dtype, training=True)
    assert (opened.name, opened.graph, list(opened.passes)) == ("my.model", "box", [ENERGIES, TRAINING])
    with recorded() as recording:
        for call in opened.passes.values():
            call()
    modules = {place for names in places_of(opened.model).values() for place in names}
    assert len(Loaded(opened.model)._modules) >= len(modules)
    return recording, modules


def test_every_convolution_is_recorded_in_its_layout_and_dtype(folder: Path) -> None:
    recording, modules = recording_of(folder)
    assert {"interactions.0.conv_tp", "interactions.1.conv_tp", "spherical_harmonics"} <= modules
    convolutions = [request for request in recording.requests if request.operation == "conv"]
    assert len({request.problem for request in convolutions}) == 2
    assert {request.dtype for request in recording.requests} == {"float32"}
    assert {request.layout for request in convolutions} == {"ir_mul"}
    assert {request.num_nodes for request in convolutions} == {len(imidazole())}
    assert {"forward", "backward"} <= {request.direction for request in convolutions}
    assert any("double" in request.direction or "joint" in request.direction for request in convolutions)
    assert any(request.operation == "harmonics" for request in recording.requests)


def test_the_dtype_may_be_another_than_the_files(folder: Path) -> None:
    recording, _ = recording_of(folder, "float64")
    assert {request.dtype for request in recording.requests} == {"float64"}


def test_a_structure_with_unknown_elements_is_an_error(folder: Path) -> None:
    ase.build.molecule("CH3Cl").write(folder / "box.xyz")
    with pytest.raises(ConfigError, match=r"my.model does not know the elements Cl; it knows"):
        open_named(str(folder / "my.model"), str(folder / "box.xyz"), "cpu", None, training=False)


@pytest.mark.parametrize("content", [b"", b"no model", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_an_error(folder: Path, content: bytes) -> None:
    (folder / "my.model").write_bytes(content)
    with pytest.raises(ConfigError, match=r"my.model cannot be read as a model of mace \("):
        open_named(str(folder / "my.model"), str(folder / "box.xyz"), "cpu", None, training=False)


def test_a_structure_that_ase_cannot_read_is_an_error(folder: Path) -> None:
    (folder / "box.xyz").write_text("no atoms")
    with pytest.raises(ConfigError, match=r"box.xyz cannot be read by ase"):
        open_named(str(folder / "my.model"), str(folder / "box.xyz"), "cpu", None, training=False)


def test_the_structure_is_needed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--structure is missing"):
        open_named(str(folder / "my.model"), None, "cpu", None, training=False)


def test_contractions_are_looked_up_like_convolutions(folder: Path) -> None:
    """By their number of nodes, also where only a tuned schedule will do."""
    recording, _ = recording_of(folder)
    contractions = [request for request in recording.requests if request.operation == "contraction"]
    assert {request.num_edges for request in contractions} == {len(imidazole())}
    table = accelerate(model_of(numbers_in(imidazole())), strict=True)
    reasons = [place.detail for place in table.places if place.kind == "symmetric contractions"]
    assert len(reasons) == 2 and all("no tuned contraction forward" in reason for reason in reasons)
