"""Small SevenNet models for the tests of Equitune inside SevenNet."""

from __future__ import annotations

import copy
from typing import Any

import sevenn._keys as KEY
import torch
from ase import Atoms
from ase.data import atomic_numbers
from model_cases import CUTOFF, Case, Results, symbols_in
from sevenn._const import DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG
from sevenn.atom_graph_data import AtomGraphData
from sevenn.model_build import build_E3_equivariant_model
from sevenn.train.dataload import unlabeled_atoms_to_graph
from torch_geometric.data import Batch

from autotune.models.package import default_dtype


class SevenNetCase(Case):
    """Models as SevenNet builds them, by default three layers up to l = 2 with other features in each l."""

    options: dict[str, Any] = {
        KEY.CUTOFF: CUTOFF,
        KEY.NUM_CONVOLUTION: 3,
        KEY.LMAX: 2,
        KEY.IS_PARITY: False,
        KEY.IRREPS_MANUAL: ["8x0e", "8x0e+4x1e+2x2e", "8x0e+4x1e+2x2e", "8x0e"],
        KEY.NODE_FEATURE_MULTIPLICITY: 8,
        KEY.CONVOLUTION_WEIGHT_NN_HIDDEN_NEURONS: [8, 8],
        KEY.CONV_DENOMINATOR: 12.0,
        KEY.SHIFT: 0.1,
        KEY.SCALE: 1.5,
        KEY._NORMALIZE_SPH: True,
    }

    def configuration(self, atoms: Atoms, **more: Any) -> dict[str, Any]:
        kinds = sorted(atomic_numbers[symbol] for symbol in symbols_in(atoms))
        species = {KEY.TYPE_MAP: {number: place for place, number in enumerate(kinds)}, KEY.NUM_SPECIES: len(kinds)}
        return {**copy.deepcopy(DEFAULT_E3_EQUIVARIANT_MODEL_CONFIG), **self.options, **species, **more}

    def build(self, atoms: Atoms, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        with default_dtype(dtype):
            model = build_E3_equivariant_model(self.configuration(atoms, **more))
        assert isinstance(model, torch.nn.Module)
        # SevenNet builds some constants, and its encoding of the elements, in float32 whatever the default is.
        model.onehot_idx_to_onehot.register_forward_hook(_in_the_models_dtype)
        return model.to(dtype)

    def batch(self, model: Any, *structures: Atoms) -> dict[str, Any]:
        graphs = [AtomGraphData.from_numpy_dict(unlabeled_atoms_to_graph(atoms, CUTOFF)) for atoms in structures]
        found = Batch.from_data_list(graphs, exclude_keys=["data_info"]).to_dict()
        dtype = next(model.parameters()).dtype
        return {
            name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in found.items()
        }

    def predict(self, model: Any, batch: dict[str, Any]) -> Results:
        model.train(model.training)
        given = {name: value.clone() if torch.is_tensor(value) else value for name, value in batch.items()}
        out = model(given)
        return {"energy": out[KEY.PRED_TOTAL_ENERGY], "forces": out[KEY.PRED_FORCE], "stress": out[KEY.PRED_STRESS]}


def _in_the_models_dtype(encoding: Any, given: tuple[Any, ...], data: dict[str, Any]) -> None:
    dtype = data[KEY.EDGE_VEC].dtype
    for key in (KEY.NODE_FEATURE, KEY.NODE_ATTR):
        data[key] = data[key].to(dtype)


CASE = SevenNetCase()
# Options of a model of two modalities, which all kinds of its layers know.
MODALITIES = {
    **{KEY.USE_MODALITY: True, KEY.NUM_MODALITIES: 2, KEY.MODAL_MAP: {"pbe": 0, "scan": 1}},
    **{KEY.USE_MODAL_NODE_EMBEDDING: True, KEY.USE_MODAL_SELF_INTER_INTRO: True},
    **{KEY.USE_MODAL_SELF_INTER_OUTRO: True, KEY.USE_MODAL_OUTPUT_BLOCK: True},
    **{KEY.USE_MODAL_WISE_SHIFT: True, KEY.USE_MODAL_WISE_SCALE: False, KEY.SHIFT: [-1.5, 2.5], KEY.SCALE: 1.3},
}
