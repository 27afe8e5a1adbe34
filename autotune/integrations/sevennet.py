"""SevenNet's ASE calculator with Equitune in its model.

Change ``from sevenn.calculator import SevenNetCalculator`` to ``from autotune.integrations.sevennet import
SevenNetCalculator`` and nothing else.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

from sevenn.calculator import SevenNetCalculator as Stock

from autotune.captured.capture import capture as captured
from autotune.integrations.accelerate import accelerate
from autotune.integrations.acceleration import CONVOLUTIONS
from kernelgen.errors import InputError

_OTHERS = ("enable_cueq", "enable_flash", "enable_oeq")


class SevenNetCalculator(Stock):
    """Takes the arguments of SevenNet's class, and accelerates the model as the last step.

    A model that is passed in, and not its file, is accelerated in place. InputError for ``enable_cueq``,
    ``enable_flash`` and ``enable_oeq`` (also by environment): they exchange the convolutions that Equitune exchanges.

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems.

    acceleration: the table of what was replaced.
    """

    model: Any

    def __init__(self, *arguments: Any, capture: bool = False, **options: Any) -> None:
        asked = [name for name in _OTHERS if options.get(name) or os.getenv(f"SEVENNET_{name.upper()}") == "1"]
        if asked:
            raise InputError(
                f"{', '.join(asked)} is on, and exchanges the same convolutions as Equitune; leave it out, or take "
                "sevenn.calculator.SevenNetCalculator"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No tensor product accelerator")
            super().__init__(*arguments, **options)
        self.acceleration = accelerate(self.model)
        if not any(place.replaced and place.kind == CONVOLUTIONS for place in self.acceleration.places):
            warnings.warn(f"no convolution of the model is Equitune's: {self.acceleration}", stacklevel=2)
        if capture:
            self.model = captured(self.model)
