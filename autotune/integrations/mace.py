"""MACE's ASE calculator with Equitune in its models.

Change ``from mace.calculators import MACECalculator`` to ``from autotune.integrations.mace import MACECalculator`` and
nothing else. For ``mace_mp`` and ``mace_off``, which download a model: ``accelerate(mace_mp(...))``.
"""

from __future__ import annotations

import warnings
from typing import Any

from mace.calculators import MACECalculator as Stock

from autotune.captured.capture import capture as captured
from autotune.integrations.accelerate import accelerate
from autotune.integrations.acceleration import CONVOLUTIONS
from kernelgen.errors import InputError


class MACECalculator(Stock):
    """Takes the arguments of MACE's class, and accelerates each model as the last step.

    So it follows what these arguments do to the models: ``default_dtype`` converts them, ``compile_mode`` compiles them
    at their first call, and with ``enable_cueq`` cuEquivariance computes what Equitune does not, such as the symmetric
    contraction. ``enable_oeq`` brings nothing: it exchanges convolutions alone. Warns if no convolution is Equitune's.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems. InputError together with ``compile_mode``.

    acceleration: the table of what was replaced.
    """

    models: list[Any]

    def __init__(self, *arguments: Any, capture: bool = False, **options: Any) -> None:
        if capture and options.get("compile_mode"):
            raise InputError("capture and compile_mode are both given; expected one of them")
        super().__init__(*arguments, **options)
        self.acceleration = accelerate(self)
        if capture:
            self.models = [captured(model) for model in self.models]
        places = [place for place in self.acceleration.places if place.kind == CONVOLUTIONS]
        if not any(place.replaced for place in places):
            reasons = "; ".join(dict.fromkeys(place.detail for place in places)) or "accelerate found none"
            warnings.warn(f"no convolution of the model is Equitune's: {reasons}", stacklevel=2)
