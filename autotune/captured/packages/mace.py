"""MACE's models of energies. Read in mace-torch 0.3.16, ``mace/modules/models.py`` and ``utils.py``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.captured.fields import Counts, Field, Fields, ghost_ends, ghost_pointer
from autotune.captured.package import CapturablePackage, along_x, cube
from kernelgen.errors import UnsupportedError

_HOME = "mace.modules.models"
# Options of a call that a captured step follows; with others the model itself is called.
_OPTIONS = ("training", "compute_force", "compute_virials", "compute_stress", "compute_displacement")
# MACE's calculator names these in every call.
_OPTIONS_THAT_MAY_BE_OFF = ("compute_hessian", "compute_edge_forces", "compute_atomic_stresses", "lammps_mliap")


@functools.cache
def _first(length: int) -> Tensor:
    """A row that is one at its first place, which for MACE is an atom of the first element."""
    return torch.nn.functional.one_hot(torch.tensor(0), length)


class CapturableMace(CapturablePackage):
    """Ghosts are in a cubic cell of twice the cutoff; each of their edges goes from an atom to its next image."""

    name = "MACE"
    classes = (f"{_HOME}.MACE", f"{_HOME}.ScaleShiftMACE")
    results = {
        **dict.fromkeys(("energy", "interaction_energy", "virials", "stress", "displacement"), "graphs"),
        "contributions": "graphs",
        **dict.fromkeys(("node_energy", "forces", "node_feats"), "atoms"),
        # None in every answer that a captured step gives.
        **dict.fromkeys(("edge_forces", "atomic_virials", "atomic_stresses", "hessian"), "atoms"),
    }

    def check(self, model: Any) -> None:
        if hasattr(model, "joint_embedding"):
            raise UnsupportedError("capture does not know the embedded features of this MACE model (embedding_specs)")

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        if options.get("training"):
            return "training"
        if "displacement" in inputs:
            return "displacement"
        if not (torch.is_grad_enabled() or options.get("compute_force", True)):
            return "no gradients"  # parts such as MACE's adapters compute in another way then
        asked = (name for name, value in options.items() if value and name not in _OPTIONS)
        unknown = (name for name in options if name not in (*_OPTIONS, *_OPTIONS_THAT_MAY_BE_OFF))
        return next(asked, "") or next(unknown, "")

    def cutoff(self, model: Any) -> float:
        return float(model.r_max)

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        edges, positions, pointer = inputs["edge_index"], inputs["positions"].detach(), inputs["ptr"]
        counts = Counts(positions.shape[0], edges.shape[-1], pointer.numel() - 1)
        elements = len(model.atomic_numbers)
        fields = {
            "positions": Field(positions, "atoms", 0.0, each=(3,)),
            "node_attrs": Field(inputs["node_attrs"].detach(), "atoms", _first(elements), each=(elements,)),
            "batch": Field(inputs["batch"], "atoms", counts.graphs, below="graphs"),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
            "shifts": Field(inputs["shifts"].detach(), "edges", along_x(2 * cutoff), each=(3,)),
            "unit_shifts": Field(inputs["unit_shifts"].detach(), "edges", along_x(1.0), each=(3,)),
            "cell": Field(inputs["cell"].detach().view(-1, 3), "graphs", cube(2 * cutoff), rows=3, each=(3,)),
            "ptr": Field(pointer, "graphs", ghost_pointer, extra=1),
        }
        if "head" in inputs:
            fields["head"] = Field(inputs["head"], "graphs", 0)
        return fields, counts

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        return model(given, **options)


CAPTURABLE = CapturableMace()
