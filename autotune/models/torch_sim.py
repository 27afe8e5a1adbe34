"""torch-sim's models with Equitune in them: many systems at a time, in one batch.

The class of a package's models may be torch-sim's (``torch_sim.models.mace.MaceModel``) or, with later versions, the
package's own (``sevenn.torchsim.SevenNetModel``, ``nequip.integrations.torchsim.NequIPTorchSimCalc``): all of them hold
the package's model as ``model``. torch-sim finds neighbours on the device of the positions.
"""

from __future__ import annotations

from typing import Any

import torch

from autotune.models.accelerate import accelerate
from autotune.models.capture import CapturedModel
from autotune.models.capture import capture as captured
from autotune.models.stand_ins import Acceleration
from kernelgen.errors import InputError


def accelerate_torch_sim(model: Any, *, capture: bool = False, **options: Any) -> Acceleration:
    """Put Equitune into a torch-sim model, in place; the table of what was replaced.

        >>> model = MaceModel(mace, device=device, dtype=torch.float32)
        >>> accelerate_torch_sim(model, capture=True)
        >>> ts.integrate(system=systems, model=model, integrator=ts.integrators.nve, ...)

    capture: on a GPU each step of energies, forces and stress is one launch (see :func:`autotune.capture`), which is
    faster for small systems and small batches. options: of :func:`autotune.accelerate`. Warns if no convolution is
    Equitune's. Raises InputError for what holds no model, UnsupportedError for a model that cannot be captured.
    """
    inside = getattr(model, "model", None)
    if not isinstance(inside, torch.nn.Module):
        raise InputError(
            f"model is of type {type(model).__name__}; expected a torch-sim model that holds a package's model as its "
            "attribute model, such as torch_sim.models.mace.MaceModel"
        )
    if isinstance(inside, CapturedModel):
        raise InputError("the torch-sim model holds a captured model already; accelerate it once")
    found = accelerate(inside, **options)
    found.warn_without_convolutions()
    if capture:
        model.model = captured(inside)
    return found
