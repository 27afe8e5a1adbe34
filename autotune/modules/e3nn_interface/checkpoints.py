"""Save and load checkpoints with e3nn's names: ``weight``, ``output_mask`` and the constants of e3nn's code."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernelgen.problem.product import TensorProductProblem

# e3nn keeps generated code as submodules, with the Wigner 3j symbols as their buffers.
CODE = ("_compiled_main_left_right.", "_compiled_main_right.")


@functools.lru_cache(maxsize=256)
def _constants(problem: TensorProductProblem, options: tuple) -> dict[str, torch.Tensor]:
    """The constants that e3nn's module of a problem adds to its checkpoints."""
    names = ("compile_left_right", "compile_right", "_specialized_code", "_optimize_einsums")
    module = problem.reference(**dict(zip(names, options, strict=True)))
    return {name: tensor for name, tensor in module.state_dict().items() if name.startswith(CODE)}


def output_mask(instructions: Any, irreps_out: Any) -> torch.Tensor:
    """Ones where at least one path adds to the result, as in e3nn."""
    reached = {i.i_out for i in instructions if i.path_weight != 0 and 0 not in i.path_shape}
    masks = [torch.full((mul * ir.dim,), float(block in reached)) for block, (mul, ir) in enumerate(irreps_out)]
    return torch.cat(masks) if masks else torch.ones(0)


class E3nnCheckpoints(torch.nn.Module):
    """A module with a ``problem`` and the buffer ``output_mask``, whose checkpoints have e3nn's format.

    Constants of e3nn's code are written for e3nn, and ignored when read. Checkpoints of older Equitune versions
    without ``output_mask`` load too.
    """

    problem: TensorProductProblem
    output_mask: torch.Tensor
    # The arguments that concern e3nn's generated code.
    _code_options: tuple

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, constant in _constants(self.problem, self._code_options).items():
            destination[prefix + name] = constant.to(self.output_mask)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        code = tuple(prefix + name for name in CODE)
        known = {name: value for name, value in state_dict.items() if not name.startswith(code)}
        known.setdefault(prefix + "output_mask", self.output_mask)
        super()._load_from_state_dict(known, prefix, *arguments)
