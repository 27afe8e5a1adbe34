"""MACE's symmetric contraction by a generated kernel, in place of the package's einsums.

Read in mace-torch 0.3.16, ``mace/modules/symmetric_contraction.py``. MACE's weights belong to linearly dependent
polynomials, the kernel's to a basis of them: each call multiplies the weights by a small matrix first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autotune.database.lookup import Tuning
from autotune.integrations.ir_mul.species import elements_of, types_of
from autotune.integrations.packages.package_product import PackageStandIn
from autotune.integrations.stand_ins import has_hooks
from autotune.modules.symmetric_contraction import TunedContraction
from autotune.workload.workload import relayout
from kernelgen.arithmetic.contraction_couplings import fitted, polynomials
from kernelgen.compat import modes_at_work, o3, runs_eagerly, without_autocast
from kernelgen.errors import UnsupportedError
from kernelgen.problem.contraction import ContractionProblem

# Couplings that are exact in float64 leave less than this of themselves (`fitted`). MACE's are float32's, though stored
# as float64, in a model converted from float32; and in part in one that was built after another in float32 by the same
# process, for cuequivariance keeps what it made of e3nn's default dtype.
EXACT = 1e-13


class AcceleratedContraction(PackageStandIn):
    """Replaces one ``SymmetricContraction`` of MACE.

    layout: ``mul_ir``, MACE's own, x [nodes, channels, components]; or ``ir_mul``, x [nodes, components * channels] and
    the result with components before channels too.
    """

    original: Any
    contraction: TunedContraction

    def __init__(
        self, original: Any, *, strict: bool | None = None, deterministic: bool = False, layout: str = "mul_ir"
    ) -> None:
        super().__init__()
        self.problem, self.layout = _problem_of(original), layout
        contraction = TunedContraction(self.problem, layout=layout, strict=strict)
        self._matrices: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self._to_basis, self._inexact = _to_basis(original, self.problem)
        self._take_place_of(original)
        self._keep_children_of(original)
        # Not registered: parameters and names in checkpoints stay MACE's.
        self.__dict__["contraction"] = contraction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """y: one-hot rows [nodes, elements], as MACE's node attributes are, or the number of each node's element."""
        elements = y if y.dim() == 1 else elements_of(y)
        if elements is None or any(map(has_hooks, _holders(self.original))):
            return self._of_original(x, y)
        given = [weight for weight, _, _ in _parts(self.original)]
        if elements.is_cpu and runs_eagerly(x, elements, *given):
            # A structure has few of a model's elements: 4 of 89 take a fifteenth of the time.
            species, members = types_of(elements, len(given[0]))
            if len(members) < len(given[0]):
                occurring = elements.index_select(0, members)
                given, elements = [weight.index_select(0, occurring) for weight in given], species.elements
        return self.contraction.contract(x, self._in_basis(given), elements)

    def _of_original(self, x: Tensor, y: Tensor) -> Tensor:
        """What MACE's own module gives: for node attributes of which it weighs several elements, and where calling its
        parts makes their weights (pruning).
        """
        if y.dim() == 1:
            y = torch.nn.functional.one_hot(y.long(), len(next(_parts(self.original))[0])).to(x)
        if self.layout == "mul_ir":
            return self.original.forward(x, y)
        components = x.view(x.shape[0], self.problem.dim_in, self.problem.channels)
        out = self.original.forward(components.transpose(1, 2).contiguous(), y)
        return relayout(out, str(self.original.irreps_out), "mul_ir", "ir_mul")

    def _in_basis(self, given: list[Tensor]) -> Tensor:
        """MACE's weights, of all blocks and degrees, as weights of the basis."""
        weights = torch.cat(given, dim=1)
        with without_autocast(weights):
            return torch.matmul(self._matrix(weights), weights)

    def _matrix(self, like: Tensor) -> Tensor:
        """[polynomials of the basis, MACE's]."""
        key = (like.device, like.dtype)
        if modes_at_work():  # what they make may not outlive them
            return self._to_basis.to(like)
        if key not in self._matrices:
            with contextlib.nullcontext() if torch.compiler.is_compiling() else _for_later():
                self._matrices[key] = self._to_basis.to(like)
        return self._matrices[key]

    def tuning_for(self, *arguments: Any) -> Mapping[str, Tuning]:
        return self.contraction.tuning_for(*arguments)

    @property
    def tuning(self) -> Mapping[str, Tuning]:
        return self.contraction.tuning

    def both_results(self, normal: Callable[..., list[Tensor]]) -> tuple[Tensor, Tensor]:
        nodes, like = 8, next(_parts(self.original))[0]
        (x,) = normal(like, (nodes, self.problem.channels, self.problem.dim_in))
        elements = torch.arange(nodes, device=like.device) * 3 % like.shape[0]
        attributes = torch.nn.functional.one_hot(elements, like.shape[0]).to(like)
        wanted = self.original.forward(x, attributes)
        if self.layout == "ir_mul":
            wanted = self._of_original(x := x.transpose(1, 2).flatten(1), attributes)
        found = self.forward(x, elements)
        # The kernel's couplings are not rounded: they differ from MACE's as much as these from exact ones.
        return (found.float(), wanted.float()) if self._inexact > EXACT else (found, wanted)

    def __getstate__(self) -> dict[str, Any]:
        # Matrices can be made again.
        return {**self.__dict__, "_matrices": {}}


@contextlib.contextmanager
def _for_later() -> Iterator[None]:
    """What is made in here serves calls with gradients too, though this one may be in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _problem_of(original: Any) -> ContractionProblem:
    """The problem that MACE's module solves; UnsupportedError for other multiplicities than one for all irreps."""
    irreps_in, irreps_out = o3.Irreps(str(original.irreps_in)), o3.Irreps(str(original.irreps_out))
    channels = {mul for mul, _ in (*irreps_in, *irreps_out)}
    if len(channels) != 1:
        raise UnsupportedError(f"its irreps have different multiplicities: {irreps_in} and {irreps_out}")
    correlation = max(contraction.correlation for contraction in original.contractions)
    one_in, one_out = ("+".join(str(ir) for _, ir in irreps) for irreps in (irreps_in, irreps_out))
    return ContractionProblem(one_in, one_out, correlation, channels.pop())


def _holders(original: Any) -> Iterator[torch.nn.Module]:
    """The parts of MACE's module that hold its weights."""
    for contraction in original.contractions:
        yield from (contraction, contraction.weights)


def why_contraction_stays(original: torch.nn.Module) -> str:
    """Why MACE's module cannot be replaced whatever it computes; empty if it can."""
    if "forward" in original.__dict__:
        return "it has a forward of its own"
    return "its parts have hooks, which may make their weights" if any(map(has_hooks, _holders(original))) else ""


def _parts(original: Any) -> Iterator[tuple[Tensor, int, int]]:
    """MACE's weights [elements, polynomials, channels], each with the output block and degree that it belongs to."""
    for block, contraction in enumerate(original.contractions):
        for place, weight in enumerate((contraction.weights_max, *contraction.weights)):
            yield weight, block, contraction.correlation - place


def _to_basis(original: Any, problem: ContractionProblem) -> tuple[Tensor, float]:
    """The matrix [polynomials of the basis, MACE's] that turns MACE's weights into the basis's; what `fitted` left."""
    basis = polynomials(problem)
    columns, inexact = [], 0.0
    for _, block, degree in _parts(original):
        tensor = original.contractions[block].U_tensors(degree)
        dim = problem.out[block].dim
        tensor = tensor.reshape(dim, *(problem.dim_in,) * degree, tensor.shape[-1])
        column = torch.zeros(len(basis), tensor.shape[-1], dtype=torch.float64)
        rows = [r for r, one in enumerate(basis) if (one.block, one.degree) == (block, degree)]
        column[rows], left = fitted(problem, block, degree, tensor)
        columns.append(column)
        inexact = max(inexact, left)
    return torch.cat(columns, dim=1), inexact
