"""SevenNet with Equitune: the ASE calculator, and files for LAMMPS."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sevenn._keys as KEY
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, all_changes
from ase.data import chemical_symbols
from sevenn.atom_graph_data import AtomGraphData
from sevenn.calculator import SevenNetCalculator as Stock
from sevenn.nn._ghost_exchange import LAMMPSMLIAPGhostExchangeOp
from sevenn.nn.convolution import IrrepsConvolution
from sevenn.nn.linear import AtomReduce
from sevenn.nn.sequential import AtomGraphSequential
from sevenn.train.dataload import unlabeled_atoms_to_graph
from torch import Tensor

from autotune.models.accelerate import accelerate
from autotune.models.lammps import TYPICAL_SIZE, RankGraph, compile_energies, ready_copy
from autotune.models.package import quietly, require_device
from autotune.models.step import QuickSteps, changes_since
from kernelgen.errors import InputError

# SevenNet's ASE calculator with Equitune in its model.
#
# Change ``from sevenn.calculator import SevenNetCalculator`` to ``from autotune.models.sevennet.use import
# SevenNetCalculator`` and nothing else.

_OTHERS = ("enable_cueq", "enable_flash", "enable_oeq")


# What its calculator takes from a model's output.
_RESULTS = (KEY.PRED_TOTAL_ENERGY, KEY.PRED_STRESS, KEY.ATOMIC_ENERGY, KEY.PRED_FORCE, KEY.PRED_ATOMIC_VIRIAL)


class SevenNetCalculator(Stock, QuickSteps):
    """Takes the arguments of SevenNet's class, and accelerates the model as the last step.

    A model that is passed in, and not its file, is accelerated in place. InputError for ``enable_cueq``,
    ``enable_flash`` and ``enable_oeq`` (also by environment): they exchange the convolutions that Equitune exchanges.
    What a simulation does not change stays on the device between steps (see ``autotune.models.step``).

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`). None: after
    ten steps of the same atoms; True: at once; False: never. On a CPU no step is: True only pads it.

    acceleration: the table of what was replaced. step: how inputs are made.
    """

    model: Any
    check_state = changes_since

    def __init__(self, *arguments: Any, capture: bool | None = None, **options: Any) -> None:
        asked = [name for name in _OTHERS if options.get(name) or os.getenv(f"SEVENNET_{name.upper()}") == "1"]
        if asked:
            raise InputError(
                f"{', '.join(asked)} is on, and exchanges the same convolutions as Equitune; leave it out, or take "
                "sevenn.calculator.SevenNetCalculator"
            )
        require_device(*arguments, options.get("device"))
        with quietly():
            super().__init__(*arguments, **options)
        self.be_quick(accelerate(self), capture)
        self.acceleration.warn_without_convolutions()

    def why_stock(self) -> str:
        return ""

    def model_cutoff(self) -> float:
        return float(self.cutoff)

    def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
        """SevenNet's results, of inputs that are kept."""
        if atoms is None or not self.steps_quickly():
            return super().calculate(atoms, properties, system_changes)
        Calculator.calculate(self, atoms, properties, system_changes)
        kept_inputs = self.kept_inputs()
        launched = kept_inputs.launched([self.model], atoms, (), lambda: self._inputs_of(atoms), names=_RESULTS)
        if launched is not None:
            output = launched[0] | {name: launched[0][name][0] for name in (KEY.PRED_TOTAL_ENERGY, KEY.PRED_STRESS)}
            output[KEY.NUM_ATOMS] = torch.tensor(len(atoms))
            output[KEY.EDGE_IDX] = torch.empty(2, kept_inputs.launched_edges)
            self.results = self.output_to_results(output)
            return
        kept, graph = kept_inputs.of(atoms, (), lambda: self._inputs_of(atoms))
        data = copy.copy(kept)
        dtype = kept[KEY.EDGE_VEC].dtype
        data[KEY.POS] = graph.positions.to(dtype)
        data[KEY.EDGE_IDX] = graph.edge_index
        data[KEY.EDGE_VEC] = graph.vectors.to(dtype)
        data[KEY.CELL_VOLUME] = torch.full_like(kept[KEY.CELL_VOLUME], atoms.cell.volume)
        if self.modal:
            data[KEY.DATA_MODALITY] = self.modal
        self.results = self.output_to_results(self.model(data))

    def _inputs_of(self, atoms: Atoms) -> AtomGraphData:
        """SevenNet's own, on the device."""
        data = AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, self.cutoff, with_shift=False))
        return data.to(self.device)


# SevenNet's models for LAMMPS.
#
# Read in sevenn 0.13.0, ``sevenn/mliap.py``, which cannot be imported without LAMMPS's Python.

# What has rows of nodes between layers.
_OF_NODES = (KEY.NODE_FEATURE, KEY.NODE_ATTR, KEY.ATOM_TYPE, KEY.SELF_CONNECTION_TEMP, KEY.BATCH)


def compile_for_lammps(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    modal: str | None = None,
    device: torch.device | str = "cpu",
    size: tuple[int, int] = TYPICAL_SIZE,
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model for LAMMPS on any number of ranks, without Python, by ``kernelgen/packs/cpp/pair_equitune.cpp``.

    As of MACE (:func:`autotune.models.mace.use.compile_for_lammps`). modal: the modality of a model that has several.
    InputError for another model than SevenNet's serial ones, and for a modality that it does not have.
    """
    _check(model, modal)
    ready = ready_copy(model, device)
    accelerate(ready)
    ready.set_is_batch_data(True)
    modal_type = torch.tensor([(ready.modal_map or {}).get(modal, 0)], device=device)
    elements = [chemical_symbols[number] for number in sorted(ready.type_map, key=ready.type_map.get)]
    dtype = next(ready.parameters()).dtype

    def energies(graph: RankGraph) -> Tensor:
        data: dict[str, Any] = {
            KEY.NODE_FEATURE: graph.elements,
            KEY.EDGE_IDX: torch.stack((graph.receiver, graph.sender)),
            KEY.EDGE_VEC: graph.vectors.to(dtype),
            KEY.MODAL_TYPE: modal_type,
            KEY.BATCH: torch.zeros_like(graph.elements),
        }
        return _atomic_energies(ready, data, graph)

    return compile_energies(energies, float(ready.cutoff), elements, path, device=device, size=size, options=options)


def _atomic_energies(model: Any, data: dict[str, Any], graph: RankGraph) -> Tensor:
    """[atoms, 1]. Before the first convolution ghosts are computed too, since only their elements matter; later not."""
    *layers, _, _ = model
    has_ghosts = True
    for layer in layers:
        if not isinstance(layer, IrrepsConvolution):
            data = layer(data)
            continue
        if not has_ghosts:
            x = data[KEY.NODE_FEATURE]
            rows = torch.cat((x, x.new_zeros(graph.ghosts, x.shape[1])))
            data[KEY.NODE_FEATURE] = LAMMPSMLIAPGhostExchangeOp.apply(rows, graph.exchange())
        data = layer(data)
        for name in _OF_NODES:
            if name in data:
                data[name] = data[name][: graph.atoms]
        has_ghosts = False
    return data[KEY.ATOMIC_ENERGY]


def _check(model: Any, modal: str | None) -> None:
    expected = "expected an AtomGraphSequential of SevenNet's, which ends in forces"
    if not isinstance(model, AtomGraphSequential):
        raise InputError(f"model is a {type(model).__name__}; {expected}")
    known = tuple(model.modal_map or ())
    if (modal not in known) if known else modal is not None:
        given = "is missing" if modal is None else f"is {modal!r}"
        raise InputError(
            f"modal {given}; expected {f'one of {known}' if known else 'None: the model has no modalities'}"
        )
    *_, last, output = model
    if not isinstance(last, AtomReduce) or "Force" not in type(output).__name__:
        raise InputError(f"model ends in {type(last).__name__} and {type(output).__name__}; {expected}")
