"""torch-sim's models with Equitune in them: many systems at a time, in one batch.

The class of a package's models is torch-sim's (``torch_sim.models.mace.MaceModel`` of 0.3) or the package's own
(``mace.calculators.mace_torchsim``, ``sevenn.torchsim``, ``nequip.integrations.torchsim``): all of them hold the
package's model as ``model``. In each step they make its inputs anew: neighbours, species, a batch. Here what does not
change while atoms move is kept, and neighbours are searched within a skin. A captured model's step is one launch
(``autotune.models.launch``).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel
from autotune.models.capture import capture as captured
from autotune.models.launch import FromDevice, OneLaunch
from autotune.models.neighbors import Batch, BatchCandidates, BatchNeighbors, missing_search
from autotune.models.package import Outputs, Package
from autotune.models.stand_ins import Acceleration
from autotune.models.step import tell_step
from autotune.models.whole_model import PACKAGES
from kernelgen.errors import InputError


@dataclass
class _Kept:
    """A model's inputs of a batch of systems, and what they were made of.

    of: numbers and systems of atoms, and periodicity, on the device. options: of the class. pbc: on the host. sizes:
    atoms of each system. seen: a state's own, when they were last equal. pairs: of the last launch.
    """

    of: tuple[Tensor, Tensor, Tensor]
    options: tuple[Any, ...]
    pbc: np.ndarray
    inputs: dict[str, Any]
    sizes: list[int]
    seen: list[tuple[Any, int]]
    pairs: BatchCandidates | None = None

    def is_of(self, state: Any, options: tuple[Any, ...], device: torch.device) -> bool:
        """Whether a state has these systems; waits for the device, unless they are the tensors of the last step."""
        if options != self.options:
            return False
        seen = _versions(state)
        if all(one is other and version == last for (one, version), (other, last) in zip(seen, self.seen, strict=True)):
            return True
        pairs = list(zip(_of(state, device), self.of, strict=True))
        if any(one.shape != other.shape for one, other in pairs):
            return False
        if not torch.stack([(one == other).all() for one, other in pairs]).all():
            return False
        self.seen = seen
        return True


def _of(state: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers and systems of atoms, and periodicity [3]."""
    return state.atomic_numbers, state.system_idx, torch.as_tensor(state.pbc, device=device).expand(3)


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether it is there: a device without a number is the current one, and no other than that with its number."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return tensor.device == device


def _versions(state: Any) -> list[tuple[Any, int]]:
    """The same as a state has them, and how often each was written to."""
    rows = (state.atomic_numbers, state.system_idx, state.pbc)
    return [(one, one._version if isinstance(one, Tensor) else 0) for one in rows]


class _Asked(Exception):
    """Ends a package's own step where it calls its model."""


class _InputsOnly(torch.nn.Module):
    """In the place of a model: remembers what it is called with."""

    def forward(self, given: Any, **options: Any) -> Any:
        self.given = given
        raise _Asked


# Candidates of a search serve where they were searched; a second one is for rounding.
_MOST_SEARCHES = 2


class _Refused(Exception):
    """The captured model would leave such inputs to the model itself."""


class _Launched:
    """In the place of a captured model: its results for ``inputs`` of a batch, whose positions it takes itself."""

    def __init__(self, wrapper: QuickModel, batch: Batch) -> None:
        self._wrapper, self._batch = wrapper, batch

    def __call__(self, given: Any, **options: Any) -> dict[str, Any]:
        wrapper, batch = self._wrapper, self._batch
        model: CapturedModel = wrapper.model  # type: ignore[attr-defined]
        kept, launch = wrapper._kept, wrapper._launch
        assert kept is not None
        if launch is None or launch.model is not model or launch.options != options:
            names = tuple(model.package.results)
            assert wrapper.neighbors is not None
            wrapper._launch = launch = OneLaunch(FromDevice, model, wrapper.neighbors.list.cutoff, names, options)
        pairs = kept.pairs or wrapper.searched(batch)
        launch.begin(batch, pairs)
        if launch.refuses(kept.inputs):
            raise _Refused
        for search in range(_MOST_SEARCHES + 1):
            pairs = wrapper.searched(batch) if search else pairs
            if (found := launch.end(batch, kept.inputs, pairs)) is not None:
                return model.package.answer(model.model, given, found)
        raise RuntimeError("neighbours that were just searched do not serve; this is an error of Equitune")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper.model, name)  # type: ignore[attr-defined]


class QuickModel:
    """Mixed into a torch-sim model, before its class.

    acceleration: of its model. step: how inputs are made, in words. neighbors: of the batch.
    """

    acceleration: Acceleration
    step: str = ""
    neighbors: BatchNeighbors | None = None
    _kept: _Kept | None = None
    _launch: OneLaunch[Batch] | None = None
    _package: Package

    def __reduce__(self) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name not in ("_kept", "_launch", "neighbors")}
        return _new, (type(self).__mro__[2],), state

    def why_stock(self) -> str:
        """Why the class's own step makes the inputs; else ""."""
        wrapper: Any = self
        model = wrapper.model
        if not all(getattr(wrapper, f"_compute_{name}", True) for name in ("forces", "stress")):
            return "it does not compute forces and stress"
        if getattr(wrapper, "_use_compile", False):
            return "compile_mode pads them"
        if getattr(wrapper, "_is_polar", False) or getattr(model, "embedding_specs", None):
            return "the model reads more of a state than species and cell"
        return "it is in training mode" if model.training else missing_search(torch.device(wrapper.device))

    def forward(self, state: Any, **options: Any) -> dict[str, Tensor]:
        """energy [systems], forces [atoms, 3] and stress [systems, 3, 3] in torch-sim's units."""
        reason = self.why_stock() or ("they are no state" if isinstance(state, dict) else "")
        step = f"the class's own, because {reason}" if reason else f"inputs kept on {self.device}"  # type: ignore[attr-defined]
        tell_step(self, step, is_stock=bool(reason))
        if not reason:
            return self._quick(state)
        if hasattr(self.model, "set_is_batch_data"):  # type: ignore[attr-defined]
            self.model.set_is_batch_data(True)  # type: ignore[attr-defined]
        return super().forward(state, **options)  # type: ignore[misc]

    @torch.no_grad()
    def _quick(self, state: Any) -> dict[str, Tensor]:
        wrapper: Any = self
        if not _is_on(state.positions, wrapper.device):
            state = state.to(wrapper.device)
        kept = self._inputs_of(state)
        batch = Batch(state.positions.detach(), state.row_vector_cell.detach())
        out = self._launched(kept, batch) or self._evaluated(wrapper.model, self._moved(batch))
        found = {"energy": out.energy, "forces": out.forces, "stress": out.stress}
        return {name: value.detach() for name, value in found.items() if value is not None}

    def _launched(self, kept: _Kept, batch: Batch) -> Outputs | None:
        """Those of one launch, if the model is captured for such inputs."""
        if not isinstance(self.model, CapturedModel):  # type: ignore[attr-defined]
            return None
        try:
            return self._evaluated(_Launched(self, batch), kept.inputs)
        except _Refused:
            return None

    @torch.enable_grad()
    def _evaluated(self, model: Any, inputs: dict[str, Any]) -> Outputs:
        return self._package.evaluate(model, inputs, training=False, stress=True)

    def _moved(self, batch: Batch) -> dict[str, Any]:
        """The model's inputs of the atoms where they are now."""
        kept, neighbors = self._kept, self.neighbors
        assert kept is not None and neighbors is not None
        graph = neighbors.graph(*batch.in_double(), kept.pbc, kept.of[1], kept.sizes)
        moving = self._package.moving(self.model, graph)  # type: ignore[attr-defined]
        return kept.inputs | {name: value.to(kept.inputs[name].dtype) for name, value in moving.items()}

    def searched(self, batch: Batch) -> BatchCandidates:
        """Candidates that serve, others than those that did not; waits for the device."""
        kept, neighbors = self._kept, self.neighbors
        assert kept is not None and neighbors is not None
        last = kept.pairs
        while (pairs := neighbors.candidates(*batch.in_double(), kept.pbc, kept.of[1], kept.sizes)) is last:
            neighbors.last = None  # by its rounding a launch found that they do not serve
        kept.pairs = pairs
        return pairs

    def _inputs_of(self, state: Any) -> _Kept:
        """Those of the last step, or what the class itself gives its model for such systems."""
        wrapper: Any = self
        options = (getattr(wrapper, "_head_index", None), getattr(wrapper, "modal", None), id(wrapper.model))
        if self._kept is None or not self._kept.is_of(state, options, wrapper.device):
            self._kept = None  # while they are made, which may fail
            model, wrapper.model = wrapper.model, _InputsOnly()
            try:
                super().forward(state.clone())  # type: ignore[misc]
            except _Asked:
                given = wrapper.model.given
            finally:
                wrapper.model = model
            given = dict(given) if isinstance(given, dict) else given.to_dict()
            numbers, system, pbc = (one.clone() for one in _of(state, wrapper.device))
            sizes = system.bincount().tolist()
            self._kept = _Kept((numbers, system, pbc), options, pbc.cpu().numpy(), given, sizes, _versions(state))
            cutoff = float(self._package.cutoff(model))
            if self.neighbors is None or self.neighbors.list.cutoff != cutoff:
                self.neighbors = BatchNeighbors(cutoff, torch.device(wrapper.device))
        return self._kept


@functools.cache
def _quick_class(stock: Any) -> Any:
    """``stock`` with :class:`QuickModel` before it."""
    return type(stock.__name__, (QuickModel, stock), {"__module__": stock.__module__})


def _new(stock: Any) -> Any:
    """A copy's object, without its state."""
    made = _quick_class(stock)
    return made.__new__(made)


# Classes whose ``forward`` was read, in torch-sim 0.3.0 and 0.6.2, and in the packages.
_CLASSES = (
    "torch_sim.models.mace.MaceModel",
    "mace.calculators.mace_torchsim.MaceTorchSimModel",
    "sevenn.torchsim.SevenNetModel",
    "nequip.integrations.torchsim.NequIPTorchSimCalc",
    "torch_sim.models.nequip_framework.NequIPFrameworkModel",
)


def accelerate_torch_sim(model: Any, *, capture: bool = False, **options: Any) -> Acceleration:
    """Put Equitune into a torch-sim model, in place; the table of what was replaced.

        >>> model = MaceModel(mace, device=device, dtype=torch.float32)
        >>> accelerate_torch_sim(model, capture=True)
        >>> ts.integrate(system=systems, model=model, integrator=ts.integrators.nve, ...)

    Inputs stay on the device from step to step, and neighbours are searched within a skin (see :class:`QuickModel`);
    where they do not, one logged line says why.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems and small batches. options: of :func:`autotune.accelerate`. Warns if no convolution is
    Equitune's. Raises InputError for what holds no model, UnsupportedError for a model that cannot be captured.
    """
    inside = getattr(model, "model", None)
    if not isinstance(inside, torch.nn.Module):
        raise InputError(
            f"model is of type {type(model).__name__}; expected a torch-sim model that holds a package's model as its "
            "attribute model, such as torch_sim.models.mace.MaceModel"
        )
    if isinstance(inside, CapturedModel):
        raise InputError("the torch-sim model holds a captured model already; accelerate it once")
    package = next((one for one in PACKAGES if one.is_installed and one.owns(inside)), None)
    found = accelerate(inside, **options)
    found.warn_without_convolutions()
    if capture:
        model.model = captured(inside)
    stock: Any = type(model)
    is_known = package is not None and f"{stock.__module__}.{stock.__qualname__}" in _CLASSES
    if is_known and not isinstance(model, QuickModel):
        model.__class__ = _quick_class(stock)
        model._package = package
    if isinstance(model, QuickModel):
        model.acceleration = found
    return found
