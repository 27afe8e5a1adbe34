"""SevenNet's models. Read in sevenn 0.13.0, ``sevenn/nn/sequential.py``, ``linear.py`` and ``force_output.py``.

The last two modules of a model wait for the device, to know how many structures there are; here it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.captured.fields import Counts, Field, Fields, ghost_ends
from autotune.captured.package import CapturablePackage, along_x
from kernelgen.errors import InputError, UnsupportedError

_HOME = "sevenn.nn.sequential.AtomGraphSequential"
# SevenNet's smallest volume, for structures without a cell.
_LEAST_VOLUME = 1e-3
_OVERWRITTEN = ("x", "node_attr")
_OF_A_GRAPH = ("inferred_total_energy", "inferred_stress")


class CapturableSevenNet(CapturablePackage):
    """The edges of ghosts are vectors of twice the cutoff."""

    name = "SevenNet"
    classes = (_HOME,)
    methods = ("forward", "__call__", "_preprocess")
    results = {
        **dict.fromkeys(_OF_A_GRAPH, "graphs"),
        **dict.fromkeys(("atomic_energy", "inferred_force", "inferred_atomic_virial"), "atoms"),
    }
    # What modules leave in the data beside their results, the first two in the place of inputs.
    left_out = frozenset(
        (*_OVERWRITTEN, "atom_type", "scaled_atomic_energy", "edge_length", "edge_embedding", "edge_attr")
    )

    def check(self, model: Any) -> None:
        if model.modal_map:
            raise UnsupportedError("capture does not know the modalities of this SevenNet model (modal_map)")
        last = list(model)[-2:]
        if [type(module).__name__ for module in last] != ["AtomReduce", "ForceStressOutputFromEdge"]:
            names = " and ".join(type(module).__name__ for module in last)
            raise UnsupportedError(
                f"this SevenNet model ends in {names}; capture takes serial models, which end in AtomReduce and "
                "ForceStressOutputFromEdge"
            )

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        return "training" if model.training else next(iter(options), "")

    def cutoff(self, model: Any) -> float:
        return float(model.cutoff)

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        edges, vectors, numbers = inputs["edge_index"], inputs["edge_vec"].detach(), inputs["atomic_numbers"]
        kinds = model._atomic_numbers_to_onehot(numbers) if model.eval_type_map else inputs["x"]
        volume = torch.as_tensor(inputs["cell_volume"]).reshape(-1)
        counts = Counts(numbers.shape[0], edges.shape[-1], volume.shape[0] if model.is_batch_data else 1)
        if "num_atoms" in inputs and model.is_batch_data and len(inputs["num_atoms"].reshape(-1)) != counts.graphs:
            raise InputError(
                f"cell_volume has {counts.graphs} numbers; expected {len(inputs['num_atoms'])} as num_atoms"
            )
        batch = inputs["batch"] if model.is_batch_data else edges.new_zeros(1).expand(counts.atoms)
        fields = {
            "x": Field(kinds, "atoms", 0),
            "batch": Field(batch, "atoms", counts.graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "edge_vec": Field(vectors, "edges", along_x(2 * cutoff), each=(3,)),
            "cell_volume": Field(volume, "graphs", 1.0),
        }
        return fields, counts

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        given["edge_vec"].requires_grad_()
        data = with_energies(model, given, size.graphs)
        (by_edge,) = torch.autograd.grad(data["inferred_total_energy"].sum(), data["edge_vec"])
        return data | forces_and_stress(model, data, by_edge, size)

    def answer(self, model: Any, inputs: Any, found: dict[str, Any]) -> dict[str, Any]:
        """With the inputs that SevenNet returns as they are; for a model that takes no batches without a structure's
        number.
        """
        if not model.is_batch_data:
            found |= {name: found[name][0] for name in _OF_A_GRAPH}
        to_dict: Callable[[], dict[str, Any]] | None = getattr(inputs, "to_dict", None)
        given = dict(inputs) if to_dict is None else to_dict()
        return {**{name: value for name, value in given.items() if name not in _OVERWRITTEN}, **found}


def with_energies(model: Any, given: dict[str, Tensor], graphs: int) -> dict[str, Any]:
    """What all modules but the last give, from the fields of a graph; the number of structures is known."""
    data: dict[str, Any] = given.copy()
    data["node_attr"] = data["x"]
    *layers, reduce, _ = model
    for layer in layers:
        data = layer(data)
    energies = data[reduce.key_input].squeeze(1)
    data[reduce.key_output] = energies.new_zeros(graphs).index_add(0, data["batch"], energies) * reduce.constant
    return data


def forces_and_stress(model: Any, data: Mapping[str, Tensor], by_edge: Tensor, size: Counts) -> dict[str, Tensor]:
    """As ``ForceStressOutputFromEdge``, from the gradient of the energy by every edge [edges, 3]."""
    (sender, receiver), edge = data["edge_index"], data["edge_vec"].detach()
    zeros = by_edge.new_zeros(size.atoms, 3)
    forces = zeros.index_add(0, sender, by_edge) - zeros.index_add(0, receiver, by_edge)
    # xx, yy, zz, xy, yz, zx
    virials = torch.cat((edge * by_edge, edge * by_edge.roll(-1, 1)), 1)
    of_atoms = by_edge.new_zeros(size.atoms, 6).index_add(0, receiver, virials)
    of_graphs = by_edge.new_zeros(size.graphs, 6).index_add(0, data["batch"], of_atoms)
    stress = -of_graphs / data["cell_volume"].clamp(min=_LEAST_VOLUME).unsqueeze(-1)
    found = {"inferred_force": forces, "inferred_stress": stress}
    *_, output = model
    return found | ({"inferred_atomic_virial": -of_atoms} if output.use_atomic_virial else {})


CAPTURABLE = CapturableSevenNet()
