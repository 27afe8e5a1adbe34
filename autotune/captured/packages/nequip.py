"""NequIP's and Allegro's models. Read in nequip 0.19.1, ``nequip/nn/graph_model.py`` and ``grad_output.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from autotune.captured.fields import Counts, Field, Fields, ghost_atoms, ghost_ends
from autotune.captured.package import CapturablePackage, along_x, cube
from kernelgen.errors import InputError, UnsupportedError

# Inputs that a captured step takes. A structure without a cell gets one of zeros.
_TAKEN = ("pos", "edge_index", "edge_cell_shift", "cell", "batch", "num_atoms", "atom_types")


class CapturableNequIP(CapturablePackage):
    """Ghosts are in a cubic cell of twice the cutoff; each of their edges goes from an atom to its next image."""

    name = "NequIP"
    classes = ("nequip.nn.graph_model.GraphModel",)
    results = {
        **dict.fromkeys(("total_energy", "stress", "virial"), "graphs"),
        **dict.fromkeys(("atomic_energy", "forces", "node_features"), "atoms"),
    }
    # What modules leave in the data beside their results.
    left_out = frozenset(
        (
            *("node_attrs", "feature_norm_factor", "edge_vectors", "edge_lengths", "normed_edge_lengths"),
            *("edge_cutoff", "edge_type_flat", "edge_attrs", "edge_embedding", "edge_features", "edge_energy"),
        )
    )

    def check(self, model: Any) -> None:
        if model.is_compile_graph_model:
            raise UnsupportedError("this NequIP model compiles itself (compile_mode: compile); capture an eager one")

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        if model.training:
            return "training"
        return next((name for name in model.model_input_fields if name in inputs and name not in _TAKEN), "")

    def cutoff(self, model: Any) -> float:
        return float(model.metadata["r_max"])

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        positions, edges = inputs["pos"].detach(), inputs["edge_index"]
        atoms, count = positions.shape[0], edges.shape[-1]
        numbers = inputs.get("num_atoms")
        if numbers is None:
            numbers = edges.new_full((1,), atoms)
        graphs = numbers.shape[0]
        batch, cell, shift = (inputs.get(name) for name in ("batch", "cell", "edge_cell_shift"))
        cells = positions.new_zeros(1, 3, 3) if cell is None else cell.detach().view(-1, 3, 3)
        if cells.shape[0] == 1:  # of all structures
            cells = cells.expand(graphs, 3, 3)
        if shift is None:
            if cell is not None:
                raise InputError("there is a cell and no edge_cell_shift; pass the cells between each edge's atoms")
            shift = positions.new_zeros(1, 3).expand(count, 3)
        if batch is None:
            if graphs != 1:
                raise InputError(
                    f"num_atoms is of {graphs} structures, and there is no batch; pass the structure of each atom"
                )
            batch = edges.new_zeros(1).expand(atoms)
        if len({positions.dtype, shift.dtype, cells.dtype}) > 1:
            raise InputError(
                f"pos is {positions.dtype}, edge_cell_shift {shift.dtype} and cell {cells.dtype}; expected one dtype"
            )
        fields = {
            "pos": Field(positions, "atoms", 0.0, each=(3,)),
            "atom_types": Field(inputs["atom_types"], "atoms", 0),
            "batch": Field(batch, "atoms", graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "edge_cell_shift": Field(shift.detach(), "edges", along_x(1.0), each=(3,)),
            "cell": Field(cells, "graphs", cube(2 * cutoff), each=(3, 3)),
            "num_atoms": Field(numbers, "graphs", ghost_atoms),
        }
        return fields, Counts(atoms, count, graphs)

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        return model(given, **options)

    def answer(self, model: Any, inputs: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """With the inputs, as NequIP returns them; without a cell there is no stress."""
        if "cell" not in inputs and "stress" in found:
            found["stress"] = found["stress"].new_empty(0)
        return {**{name: inputs[name] for name in _TAKEN if name in inputs}, **found}


CAPTURABLE = CapturableNequIP()
