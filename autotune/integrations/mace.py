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

    So it follows what these arguments do to the models: ``default_dtype`` converts them, and ``compile_mode`` compiles
    them at their first call. It warns if no convolution is Equitune's: ``enable_oeq`` exchanges the convolutions alone,
    so it is of no use here.

    acceleration: the table of what was replaced.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.acceleration = accelerate(self)
        if not any(place.replaced and place.kind == CONVOLUTIONS for place in self.acceleration.places):
            warnings.warn(f"no convolution of the model is Equitune's: {self.acceleration}", stacklevel=2)
