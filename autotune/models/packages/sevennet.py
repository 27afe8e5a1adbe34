"""SevenNet: its sequential model, and the convolutions that it can take from other packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autotune.errors import PeerError
from autotune.models.packages.base import Outputs, Package, Parameters, converted, default_dtype, dtype_of, numbers_of

if TYPE_CHECKING:
    from ase import Atoms

# The switch of the configuration that takes a convolution from another package.
_SWITCH: dict[str, dict[str, Any]] = {
    "cuequivariance": {"cuequivariance_config": {"use": True}},
    "openequivariance": {"use_oeq": True},
    "flashtp": {"use_flash_tp": True},
}
# The name under which a model remembers what it was built from: a fast path builds it again.
_ORIGIN = "_equitune_configuration"
# Order of its six stress components in the symmetric matrix.
_VOIGT = [[0, 3, 5], [3, 1, 4], [5, 4, 2]]


class SevenNet(Package):
    name = "sevennet"
    modules = ("sevenn",)
    install = "sevenn==0.13.0"
    captured = True
    peers = tuple(_SWITCH)

    def build(self, parameters: Parameters, seed: int) -> torch.nn.Module:
        from ase.data import chemical_symbols
        from sevenn import _const, util

        given = dict(parameters)
        numbers = numbers_of(given.pop("species"))
        configuration = {**_const.DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG, **given}
        configuration |= util.chemical_species_preprocess([chemical_symbols[number] for number in numbers])
        torch.manual_seed(seed)
        return _built(configuration)

    def load(self, path: Path) -> torch.nn.Module:
        from sevenn.util import load_checkpoint

        checkpoint = load_checkpoint(str(path))
        model = checkpoint.build_model()
        setattr(model, _ORIGIN, checkpoint.config)
        return model

    def owns(self, model: torch.nn.Module) -> bool:
        return type(model).__module__.startswith("sevenn.")

    def cutoff(self, model: Any) -> float:
        return float(model.cutoff)

    def species(self, model: Any) -> tuple[int, ...]:
        return tuple(sorted(model.type_map))

    def inputs(self, model: torch.nn.Module, atoms: Sequence[Atoms], device: str) -> dict[str, Any]:
        from sevenn.atom_graph_data import AtomGraphData
        from sevenn.train.dataload import unlabeled_atoms_to_graph
        from torch_geometric.data import Batch

        graphs = []
        for one in atoms:
            arrays = unlabeled_atoms_to_graph(one.copy(), self.cutoff(model))
            vectors = torch.from_numpy(arrays["edge_vec"])
            graphs.append(AtomGraphData.from_numpy_dict(arrays))
            graphs[-1]["edge_vec"] = vectors  # which the package rounds to float32
        batch = Batch.from_data_list(graphs, exclude_keys=["data_info"])
        return converted(batch.to_dict(), device, dtype_of(model))

    def evaluate(self, model: Any, inputs: dict[str, Any], *, training: bool, stress: bool) -> Outputs:
        # Its calculator evaluates one structure without batches, its training loop batches.
        batched = training or inputs["num_atoms"].numel() > 1
        if model.is_batch_data != batched:
            model.set_is_batch_data(batched)
        given = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        if batched:
            given["cell_volume"] = given["cell_volume"].clone()  # it is written to
        out = model(given)
        found = out["inferred_stress"].reshape(-1, 6)[:, _VOIGT] if stress else None
        return Outputs(out["inferred_total_energy"].reshape(-1), out["inferred_force"], found)

    def edges(self, inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["edge_index"]

    def accelerated(self, model: torch.nn.Module, peer: str, device: str) -> torch.nn.Module:
        configuration = getattr(model, _ORIGIN, None)
        if configuration is None:
            raise PeerError(f"{peer}: SevenNet builds the model again for it, from hyperparameters that are not known")
        if torch.device(device).type != "cuda":
            raise PeerError(f"{peer}: SevenNet takes it on a CUDA device only")
        dtype = dtype_of(model)
        with default_dtype(dtype):
            made = _built({**configuration, **_SWITCH[peer]}).to(device, dtype)
        _copy_weights(model, made)
        made.train(model.training)
        return made


def _built(configuration: Mapping[str, Any]) -> torch.nn.Module:
    from sevenn.model_build import build_E3_equivariant_model

    model = build_E3_equivariant_model(dict(configuration))
    # Some of its constants are float32 whatever the default is, and so is its one-hot encoding of elements.
    dtype = torch.get_default_dtype()
    model = model.to(dtype)
    if dtype != torch.float32:
        model.onehot_idx_to_onehot.register_forward_hook(_in_double)
    setattr(model, _ORIGIN, dict(configuration))
    return model


def _in_double(encoding: Any, given: tuple[Any, ...], data: dict[str, Any]) -> None:
    """Cast the encoding, which the next layers multiply by weights."""
    for key in ("x", "node_attr"):
        data[key] = data[key].double()


def _copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy all parameters by name; their order is the same for all convolutions."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if name not in weights:
                raise PeerError(f"the model's {name} has no counterpart in the stock model")
            weight.copy_(weights[name].reshape(weight.shape))
