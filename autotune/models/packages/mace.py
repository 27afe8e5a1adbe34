"""MACE: ``ScaleShiftMACE`` and its conversions to cuEquivariance and OpenEquivariance, one at a time or both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.models.packages.base import Outputs, Package, Parameters, converted, default_dtype, dtype_of, numbers_of

if TYPE_CHECKING:
    from ase import Atoms


class Mace(Package):
    name = "mace"
    modules = ("mace",)
    install = "mace-torch==0.3.16"
    captured = True
    peers = ("cuequivariance", "openequivariance", "cuequivariance+openequivariance")
    joined = ("cuequivariance",)

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        import numpy as np
        from mace import modules

        from kernelgen.compat import o3

        numbers = numbers_of(parameters["species"])
        block = modules.interaction_classes
        torch.manual_seed(seed)
        return modules.ScaleShiftMACE(
            r_max=parameters["cutoff"],
            num_bessel=parameters["num_bessel"],
            num_polynomial_cutoff=parameters["num_polynomial_cutoff"],
            max_ell=parameters["max_ell"],
            interaction_cls=block[parameters["interaction"]],
            interaction_cls_first=block[parameters["interaction_first"]],
            num_interactions=parameters["num_interactions"],
            num_elements=len(numbers),
            hidden_irreps=o3.Irreps(parameters["hidden_irreps"]),
            MLP_irreps=o3.Irreps(parameters["mlp_irreps"]),
            atomic_energies=np.zeros(len(numbers)),
            avg_num_neighbors=parameters["avg_num_neighbors"],
            atomic_numbers=list(numbers),
            correlation=parameters["correlation"],
            gate=torch.nn.functional.silu,
            radial_MLP=list(parameters["radial_mlp"]),
            radial_type="bessel",
            atomic_inter_scale=parameters["scale"],
            atomic_inter_shift=parameters["shift"],
        )

    def load(self, path: Path) -> torch.nn.Module:
        import mace.modules  # noqa: F401  (the file names its classes)

        return torch.load(path, map_location="cpu", weights_only=False)

    def owns(self, model: torch.nn.Module) -> bool:
        return type(model).__module__.startswith("mace.")

    def cutoff(self, model: Any) -> float:
        return float(model.r_max)

    def species(self, model: Any) -> tuple[int, ...]:
        return tuple(int(number) for number in model.atomic_numbers)

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from mace import data
        from mace.tools import torch_geometric, utils

        table = utils.AtomicNumberTable(list(self.species(model)))
        keys = data.KeySpecification()
        with default_dtype(dtype_of(model)):
            graphs = [
                data.AtomicData.from_config(
                    data.config_from_atoms(one, key_specification=keys),
                    z_table=table,
                    cutoff=self.cutoff(model),
                    heads=getattr(model, "heads", None),
                )
                for one in atoms
            ]
            batch = torch_geometric.Batch.from_data_list(graphs)
        # A model reads no labels; absent ones are zeros of no use.
        read = ("batch", "cell", "edge_index", "head", "node_attrs", "pbc", "positions", "ptr", "shifts", "unit_shifts")
        found = {name: value for name, value in batch.to_dict().items() if name in read}
        return converted(found, device, dtype_of(model))

    def evaluate(self, model: torch.nn.Module, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        # The model writes into the dictionary, and positions must not keep what an earlier call recorded.
        given = inputs | {"positions": inputs["positions"].detach()}
        out = model(given, training=training, compute_force=True, compute_stress=stress)
        return Outputs(out["energy"], out["forces"], out["stress"] if stress else None)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["edge_index"]

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        # Without the number: its conversion to cuEquivariance fuses the convolution only for "cuda".
        kind = torch.device(device).type
        with default_dtype(dtype_of(model)):
            if peer == "cuequivariance":
                from mace.cli.convert_e3nn_cueq import run
            elif peer == "openequivariance":
                from mace.cli.convert_e3nn_oeq import run
            else:
                from mace.cli.convert_e3nn_hybrid import run
            return run(model, device=kind)
