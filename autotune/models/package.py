"""What a model package offers, and what is known of it: one table a package.

How a model is built or loaded, fed and called; which of its parts are replaced; how a captured step computes it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from autotune.errors import ConfigError
from kernelgen.device import check_cuda
from kernelgen.errors import UnsupportedError

if TYPE_CHECKING:
    from ase import Atoms

    from autotune.models.layout import ModelLayout
    from autotune.models.neighbors import AtomicGraph
    from autotune.models.padding import Counts, Fields
    from autotune.models.radial import EdgeNetworks, RadialBlock
    from autotune.models.replace import ConvolutionBlock, Exchange, PackageProduct

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Outputs:
    """Values of a batch: energy [structures] in eV, forces [atoms, 3], stress [structures, 3, 3] if asked for.

    node_energy: of each atom [atoms], where the model gives it.
    """

    energy: Tensor
    forces: Tensor
    stress: Tensor | None = None
    node_energy: Tensor | None = None


class Package(ABC):
    """One model package. Models stay the package's own objects, and are run as its users run them.

    title: its name in a sentence. modules: what must be importable. install: what to type if it is not. excludes:
    modules of packages that cannot be in one environment with it: MACE pins e3nn 0.4.4, the others need a later one.
    peers: names of its own fast paths. joined: those in which Equitune's convolution may take the place of theirs.
    compiled: its ways to compile a model, each with the paths, peers or stock, that take it. stress_is_apart: whether a
    step without stress leaves its computation out. neighbor_function: module and name of the function by which its
    calculator finds neighbors. dtype_of_data: torch's default dtype in the programs that its calculator is made for.

    What :func:`autotune.accelerate` replaces: blocks that gather, multiply and sum, with a product of e3nn's (blocks)
    or another library's (exchanges); radial_blocks, whose network gives a convolution's weights; other edge_networks;
    products that are not e3nn's; layouts of whole models.

    What :func:`autotune.capture` takes: classes: full names of those whose ``forward`` was read. methods: what a step
    takes the place of. results: by name of a model's result, what its rows are: ``atoms`` or ``graphs``. left_out:
    names of the others, which a captured step does not give.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    install: ClassVar[str]
    excludes: ClassVar[tuple[str, ...]] = ("mace",)
    peers: ClassVar[tuple[str, ...]] = ()
    joined: ClassVar[tuple[str, ...]] = ()
    compiled: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    stress_is_apart: ClassVar[bool] = False
    neighbor_function: ClassVar[tuple[str, str]]
    dtype_of_data: ClassVar[torch.dtype] = torch.float32

    blocks: ClassVar[tuple[ConvolutionBlock, ...]] = ()
    exchanges: ClassVar[tuple[Exchange, ...]] = ()
    radial_blocks: ClassVar[tuple[RadialBlock, ...]] = ()
    edge_networks: ClassVar[tuple[EdgeNetworks, ...]] = ()
    products: ClassVar[tuple[PackageProduct, ...]] = ()
    layouts: ClassVar[tuple[ModelLayout, ...]] = ()

    classes: ClassVar[tuple[str, ...]] = ()
    methods: ClassVar[tuple[str, ...]] = ("forward", "__call__")
    results: ClassVar[Mapping[str, str]] = {}
    left_out: ClassVar[frozenset[str]] = frozenset()

    @property
    def captured(self) -> bool:
        """Whether :func:`autotune.capture` takes its models."""
        return bool(self.classes)

    def _missing(self) -> list[str]:
        return [module for module in self.modules if importlib.util.find_spec(module) is None]

    @property
    def is_installed(self) -> bool:
        return not self._missing()

    def require(self) -> None:
        """ConfigError with what to install, unless the package can be imported."""
        missing = self._missing()
        if not missing:
            return
        advice = f"pip install {self.install}"
        if other := next(filter(importlib.util.find_spec, self.excludes), None):
            home = f"{self.name}-env"
            advice = (
                f"make an environment of its own for it, since {other}, which is here, needs another e3nn: python3 -m "
                f"venv {home}, then {home}/bin/{advice} and Equitune"
            )
        raise ConfigError(f"{self.name} is not installed (no module {missing[0]!r}): {advice}")

    @abstractmethod
    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        """A model with random weights, on the CPU, in torch's default dtype."""

    @abstractmethod
    def load(self, path: Path) -> torch.nn.Module:
        """The model in a file of the package, on the CPU, in the dtype in which it was saved."""

    def in_dtype(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """The model with its weights in a dtype, in place."""
        return model.to(dtype)

    @abstractmethod
    def owns(self, model: torch.nn.Module) -> bool:
        """Whether ``model`` is one of this package."""

    @abstractmethod
    def cutoff(self, model: torch.nn.Module) -> float:
        """Largest distance of neighbours, in angstrom; it may be on the device, so that a capture asks once."""

    @abstractmethod
    def species(self, model: torch.nn.Module) -> tuple[int, ...]:
        """Atomic numbers that the model knows."""

    @abstractmethod
    def inputs(self, model: torch.nn.Module, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        """What the model takes for a batch of structures, by the package's own neighbour list, in the model's dtype."""

    @abstractmethod
    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        """Energies and forces of inputs, which stay as they are; ``training``: forces can be differentiated again."""

    def edges(self, inputs: dict[str, Any]) -> Tensor:
        """Indices of the edges' two ends [2, edges]."""
        return inputs["edge_index"]

    @abstractmethod
    def calculator(self, model: torch.nn.Module, device: str) -> Any:
        """Its own ASE calculator of a model that is on the device."""

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        """The same model, weights included, by one of the package's fast paths; PeerError with the reason if not."""
        raise NotImplementedError(peer)

    def in_compiled_form(self, model: torch.nn.Module, form: str, device: str) -> torch.nn.Module:
        """A stock or accelerated model, compiled by one of the package's own ways."""
        raise NotImplementedError(form)

    # Its models as functions of padded tensors, for captured steps; only of a package with ``classes``.

    def check_captured(self, model: Any) -> None:
        """UnsupportedError for a model that cannot be captured, with the reason."""
        return None

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Why a call is left to the model itself: it asks for what a captured step does not give; else empty."""
        raise NotImplementedError(self.name)

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        """The tensors that the model reads, and the numbers of atoms, edges and graphs in them; does not wait."""
        raise NotImplementedError(self.name)

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        """The model's results for padded tensors; must not wait for the device."""
        return model(given, **options)

    def training_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options of a call whose forces are differentiated again, of a model in training mode."""
        return options

    def known_results(self, out: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Those results that a captured step gives; UnsupportedError if it does not know one.

        given: the inputs, with which some models return their results.
        """
        unknown = out.keys() - self.results.keys() - self.left_out - given.keys()
        if unknown:
            raise UnsupportedError(
                f"the model gives {', '.join(sorted(unknown))}, of which capture does not know the rows; call the "
                "model itself, uncaptured"
            )
        return {name: out[name] for name in self.results if name in out}

    def answer(self, model: Any, inputs: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """What a call returns, of the real results: as much as the model itself does."""
        return found

    def moving(self, model: Any, graph: AtomicGraph) -> dict[str, Tensor]:
        """Those of :meth:`fields`' tensors that change when the atoms move; does not wait."""
        raise NotImplementedError(self.name)


# What torch and packages say when a model is made or read, and who makes or reads it can do nothing about.
NOISE = (
    "The TorchScript type system doesn't support",
    "Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected",
    "To copy construct from a tensor",
    "No tensor product accelerator",
)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No warning of :data:`NOISE` inside the block."""
    with warnings.catch_warnings():
        for message in NOISE:
            warnings.filterwarnings("ignore", message)
        yield


def require_device(*given: Any) -> None:
    """ToolMissingError, with a remedy, if one of a call's arguments is a GPU and torch has none."""
    if any(isinstance(one, str | torch.device) and re.fullmatch(r"cuda(:\d+)?", str(one)) for one in given):
        check_cuda()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch's default dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """The dtype of the model's largest weight: Allegro's radial functions are float64 in every model."""
    weights = (weight for weight in model.parameters() if weight.is_floating_point())
    return max(weights, key=Tensor.numel).dtype


def converted(values: Mapping[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Tensors on the device, floating ones in ``dtype``; other values are kept."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in values.items()
    }


def numbers_of(text: str) -> tuple[int, ...]:
    """Atomic numbers from ``1-83, 89-94``."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)
