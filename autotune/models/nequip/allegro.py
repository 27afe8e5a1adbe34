"""Allegro's ``Contracter``: a product of channels with the same number, with shared weights by path.

Read in nequip-allegro 0.8.3, ``allegro/nn/_strided/_contract.py`` and ``allegro/nn/_allegro.py``. Its tensors are
*strided*, ``[rows, channels, components of all irreps]``: the transpose of layout ``ir_mul``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from autotune.database.lookup import Tuning
from autotune.models.nequip.package import NequIP
from autotune.models.replace import PackageProduct, PackageStandIn, home_of
from autotune.modules.product import TensorProduct
from kernelgen.compat import runs_eagerly

_HOME = "allegro.nn._strided._contract"
_AGAIN = object()
_OTHER_FORMS = {"TritonContracter": "Triton", "CuEquivarianceContracter": "cuEquivariance"}


class AcceleratedContracter(PackageStandIn):
    """Replaces one ``Contracter``."""

    original: Any
    product: TensorProduct

    def __init__(self, original: Any, *, strict: bool | None = None, deterministic: bool = False) -> None:
        super().__init__()
        irreps = (original.irreps_in1, original.irreps_in2, original.irreps_out)
        irreps_in1, irreps_in2, irreps_out = ("+".join(f"{original.mul}x{ir}" for _, ir in found) for found in irreps)
        product = TensorProduct(
            irreps_in1,
            irreps_in2,
            irreps_out,
            [(*path, "uuu", True) for path in _paths_of(original)],
            irrep_normalization="none" if original.irrep_normalization is None else original.irrep_normalization,
            path_normalization="none",
            internal_weights=False,
            shared_weights=True,
            layout="ir_mul",
            strict=strict,
            deterministic=deterministic,
        )
        # Not registered: parameters and names in checkpoints stay Allegro's.
        self.__dict__["product"] = product
        self._take_place_of(original)

    def forward(self, x1: Tensor, x2: Tensor, idxs: Tensor) -> Tensor:
        """x1 of edges, x2 of nodes, ``idxs``: the node of each edge. The result is a transposed view."""
        x1 = x1.reshape(-1, self.mul, self.base_dim1).transpose(1, 2).flatten(1)
        # A product's second input is in layout mul_ir whatever the layout of the first is: irrep, channel, component.
        parts = x2.reshape(-1, self.mul, self.base_dim2).split([ir.dim for _, ir in self.irreps_in2], dim=2)
        x2 = torch.cat([part.flatten(1) for part in parts], dim=1)
        gathered = torch.index_select(x2, 0, idxs)
        with _gathered_again(x2, idxs, gathered):
            out = self.product(x1, gathered, self._weights_by_path())
        return out.view(-1, self.base_dim_out, self.mul).transpose(1, 2)

    def _weights_by_path(self) -> Tensor:
        """Allegro's weights, by channel and path or by path alone, as a row of channels for each path."""
        weights = self.weights.reshape(-1, self.num_paths)
        return weights.expand(self.mul, self.num_paths).t().flatten()

    def tuning_for(self, *arguments: Any) -> Mapping[str, Tuning]:
        return self.product.tuning_for(*arguments)

    @property
    def tuning(self) -> Mapping[str, Tuning]:
        return self.product.tuning

    def both_results(self, normal: Callable[..., list[Tensor]]) -> tuple[Tensor, Tensor]:
        rows, nodes = 16, 4
        x1, x2 = normal(self.w3j, (rows, self.mul, self.base_dim1), (nodes, self.mul, self.base_dim2))
        given = (x1, x2, torch.arange(rows, device=x1.device) % nodes)
        return self.forward(*given), self.original.forward(*given)


def _unchanged(packed: Any) -> Any:
    return packed


def _gathered_again(rows: Tensor, index: Tensor, gathered: Tensor) -> AbstractContextManager[Any]:
    """What is computed inside keeps ``rows`` for its gradients in the place of ``gathered``, the rows of ``index``.

    A node's rows are gathered for each of its edges: on diamond 273 times as many. Gradients gather them again.
    """
    if not runs_eagerly(rows, index, gathered):
        return nullcontext()
    kept, place, shape = rows.detach(), gathered.data_ptr(), gathered.shape
    # Torch asks the innermost hooks alone: what they leave is for those around them, if this torch tells them.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    pack, unpack = top(False) or (_unchanged, _unchanged)

    def keep(tensor: Tensor) -> Any:
        return _AGAIN if tensor.data_ptr() == place and tensor.shape == shape else pack(tensor)

    def again(packed: Any) -> Tensor:
        return torch.index_select(kept, 0, index) if packed is _AGAIN else unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(keep, again)


def _why_it_stays(module: torch.nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if (home_of(kind), kind.__qualname__) == (_HOME, "Contracter"):
            name = type(module).__name__
            if kind is type(module):
                return ""
            form = _OTHER_FORMS.get(name)
            return f"it is Allegro's {form} form, put there by its modifier" if form else f"it is a {name}"
    return None


def _paths_of(original: Any) -> list[tuple[int, int, int]]:
    """Its paths in their order: first input, second input, output."""
    if original.instructions is not None:
        return [tuple(path) for path in original.instructions]
    return [
        (first, second, out)
        for out, (_, ir_out) in enumerate(original.irreps_out)
        for first, (_, ir1) in enumerate(original.irreps_in1)
        for second, (_, ir2) in enumerate(original.irreps_in2)
        if ir_out in ir1 * ir2
    ]


PRODUCT = PackageProduct(_why_it_stays, AcceleratedContracter)


# Allegro: its model, and its modifiers for the product's Triton and cuEquivariance forms. All else is NequIP's.
#
# Read in nequip-allegro 0.8.3, ``allegro/model/allegro_models.py`` and ``allegro/nn/_strided/_contract.py``.

_MODIFIERS = {"cuequivariance": "enable_CuEquivarianceContracter", "triton": "enable_TritonContracter"}


class Allegro(NequIP):
    name = "allegro"
    modules = ("allegro", *NequIP.modules)
    install = "nequip-allegro==0.8.3"
    modifiers = _MODIFIERS
    peers = tuple(_MODIFIERS)
    compiled: ClassVar[Mapping[str, tuple[str, ...]]] = {"aotinductor": ("stock", *_MODIFIERS)}

    def builder(self) -> Callable[..., torch.nn.Module]:
        from allegro.model import AllegroModel

        return AllegroModel

    def owns(self, model: torch.nn.Module) -> bool:
        """NequIP's class holds its modules."""
        return super().owns(model) and any("allegro." in type(module).__module__ for module in model.modules())
