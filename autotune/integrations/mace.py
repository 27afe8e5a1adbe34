"""MACE's ASE calculator with Equitune in its models.

Change ``from mace.calculators import MACECalculator`` to ``from autotune.integrations.mace import MACECalculator`` and
nothing else. For ``mace_mp`` and ``mace_off``, which download a model: ``accelerate(mace_mp(...))``.
"""

from __future__ import annotations

import warnings
from typing import Any

from mace.calculators import MACECalculator as Stock

from autotune.integrations.accelerate import accelerate
from autotune.integrations.acceleration import CONVOLUTIONS


class MACECalculator(Stock):
    """Takes the arguments of MACE's class, and accelerates each model as the last step.

    So it follows what these arguments do to the models: ``default_dtype`` converts them, ``compile_mode`` compiles them
    at their first call, and with ``enable_cueq`` cuEquivariance computes what Equitune does not, such as the symmetric
    contraction. ``enable_oeq`` brings nothing: it exchanges convolutions alone. Warns if no convolution is Equitune's.

    acceleration: the table of what was replaced.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.acceleration = accelerate(self)
        places = [place for place in self.acceleration.places if place.kind == CONVOLUTIONS]
        if not any(place.replaced for place in places):
            reasons = "; ".join(dict.fromkeys(place.detail for place in places)) or "accelerate found none"
            warnings.warn(f"no convolution of the model is Equitune's: {reasons}", stacklevel=2)
