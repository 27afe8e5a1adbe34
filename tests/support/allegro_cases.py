"""Small Allegro models for the tests of Equitune inside Allegro."""

from __future__ import annotations

from allegro.model import AllegroModel
from nequip_cases import NequIPCase


class AllegroCase(NequIPCase):
    """Two layers up to l = 2 of both parities."""

    options = {
        "num_layers": 2,
        "l_max": 2,
        "parity": True,
        "num_scalar_features": 8,
        "num_tensor_features": 4,
        "allegro_mlp_hidden_layers_width": 8,
        "scalar_embed_mlp_hidden_layers_width": 8,
        "readout_mlp_hidden_layers_width": 4,
        "avg_num_neighbors": 12.0,
        "radial_chemical_embed": {
            "_target_": "allegro.nn.TwoBodyBesselScalarEmbed",
            "num_bessels": 4,
        },
    }
    builder = staticmethod(AllegroModel)


CASE = AllegroCase()
