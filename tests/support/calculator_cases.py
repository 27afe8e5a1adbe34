"""The ASE calculators of each package, stock and with Equitune, of equal small models for the elements of imidazole."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import torch
from model_cases import CUTOFF, imidazole, small_model, symbols_in


def calculators(package: str, **options: Any) -> tuple[Any, Any]:
    """Stock, and Equitune's class; both in evaluation, SevenNet's in float32, which its calculator asks for.

    options: of both, such as ``device``.
    """
    return stock_calculator(package, **options), quick_calculator(package, **options)


def stock_calculator(package: str, **options: Any) -> Any:
    return _calculator(package, stock=True, **options)


def quick_calculator(package: str, **options: Any) -> Any:
    return _calculator(package, stock=False, **options)


@functools.cache
def _model(package: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    return small_model(package, dtype).eval()


def model_for(package: str, dtype: torch.dtype = torch.float64) -> Any:
    """A copy, which may be accelerated."""
    try:
        return copy.deepcopy(_model(package, dtype))
    except pickle.PickleError:  # in one process with another package, which has e3nn compile by TorchScript
        return small_model(package, dtype).eval()


def _calculator(package: str, *, stock: bool, device: str = "cpu", **options: Any) -> Any:
    if package == "mace":
        from mace.calculators import MACECalculator as Mace

        from autotune.models.mace.use import MACECalculator

        return (Mace if stock else MACECalculator)(models=model_for("mace"), device=device, **options)
    if package == "sevennet":
        from sevenn.calculator import SevenNetCalculator as Seven

        from autotune.models.sevennet.use import SevenNetCalculator

        kind = Seven if stock else SevenNetCalculator
        return kind(model_for("sevennet", torch.float32), file_type="model_instance", device=device, **options)
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.ase import NequIPCalculator as Neq

    from autotune.models.nequip.use import NequIPCalculator

    transforms = [ChemicalSpeciesToAtomTypeMapper(symbols_in(imidazole())), NeighborListTransform(r_max=CUTOFF)]
    options.setdefault("transforms", copy.deepcopy(transforms))
    return (Neq if stock else NequIPCalculator)(model_for(package), device, **options)
