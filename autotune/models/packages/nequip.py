"""NequIP: its GNN model and its modifiers for OpenEquivariance and cuEquivariance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from autotune.models.packages.base import Outputs, Package, Parameters, converted, default_dtype, numbers_of

if TYPE_CHECKING:
    from ase import Atoms

_MODIFIERS = {"cuequivariance": "enable_CuEquivariance", "openequivariance": "enable_OpenEquivariance"}


class NequIP(Package):
    """``modifiers``: those of the package that put its fast paths into a model, by peer."""

    name = "nequip"
    modules: ClassVar[tuple[str, ...]] = ("nequip", "lightning")
    install = "nequip==0.19.1"
    captured = True
    modifiers: ClassVar[Mapping[str, str]] = _MODIFIERS
    peers = tuple(_MODIFIERS)

    def builder(self) -> Callable[..., torch.nn.Module]:
        """The package's function that makes a model of hyperparameters."""
        from nequip.model import NequIPGNNModel

        return NequIPGNNModel

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        from ase.data import chemical_symbols
        from nequip.utils.global_state import set_global_state

        given = dict(parameters)
        names = [chemical_symbols[number] for number in numbers_of(given.pop("species"))]
        if given.pop("zbl"):
            given["pair_potential"] = {
                "_target_": "nequip.nn.pair_potential.ZBL",
                "units": "metal",
                "chemical_species": names,
            }
        dtype = torch.get_default_dtype()
        set_global_state()
        torch.set_default_dtype(dtype)  # the line above changes it
        return self.builder()(
            r_max=given.pop("cutoff"),
            type_names=names,
            per_type_energy_scales=given.pop("scale"),
            per_type_energy_shifts=given.pop("shift"),
            seed=seed,
            model_dtype=str(dtype).removeprefix("torch."),
            compile_mode="eager",
            **given,
        )

    def load(self, path: Path) -> torch.nn.Module:
        from nequip.model.saved_models import load_saved_model
        from nequip.utils.global_state import set_global_state

        set_global_state()
        return load_saved_model(str(path), compile_mode="eager")

    def owns(self, model: torch.nn.Module) -> bool:
        # A packaged model's classes are in modules like <torch_package_0>.nequip.nn.graph_model.
        return "nequip." in type(model).__module__

    def cutoff(self, model: Any) -> float:
        return float(model.metadata["r_max"])

    def species(self, model: Any) -> tuple[int, ...]:
        from ase.data import atomic_numbers

        return tuple(sorted(atomic_numbers[name] for name in model.metadata["type_names"].split()))

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from nequip.data import AtomicDataDict, from_ase
        from nequip.integrations.utils import basic_transforms

        names = model.metadata["type_names"].split()
        transforms = basic_transforms(model.metadata, self.cutoff(model), names, {name: name for name in names})
        frames = []
        # Geometry stays in float64, as its calculator passes it: the model casts what it derives from it.
        with default_dtype(torch.float64):
            for one in atoms:
                frame = from_ase(one)
                for transform in transforms:
                    frame = transform(frame)
                frames.append(frame)
            data = frames[0] if len(frames) == 1 else AtomicDataDict.batched_from_list(frames)
        return converted(data, device, torch.float64)

    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        out = model({name: value.detach() for name, value in inputs.items()})
        found = out["stress"].reshape(-1, 3, 3) if stress else None
        return Outputs(out["total_energy"].reshape(-1), out["forces"], found)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["edge_index"]

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        from nequip.model.modify_utils import modify

        # Without a dtype: parts of the model are float64 in every model.
        return modify(model, [{"modifier": self.modifiers[peer]}]).to(device)
