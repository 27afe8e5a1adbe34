"""Models that MACE converted for cuEquivariance or OpenEquivariance get Equitune's convolution, and keep the rest."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("mace", reason="MACE is not installed")

from e3nn import o3
from mace.modules.wrapper_ops import with_oeq_conv_fusion
from mace_cases import assert_same, batch_of, default_dtype, imidazole, model_of, numbers_in, results

from autotune.models.accelerate import accelerate, restore
from autotune.models.mace.package import ConvertedConvolution


class Theirs(torch.nn.Module):
    """OpenEquivariance's convolution as MACE calls it, computed by e3nn: the library needs a GPU."""

    __module__ = "openequivariance.conv"

    def __init__(self, product: o3.TensorProduct, error: float = 0.0) -> None:
        super().__init__()
        self.product, self.error, self.weight_numel = product, error, product.weight_numel

    def forward(self, x: Any, y: Any, weights: Any, receiver: Any, sender: Any) -> torch.Tensor:
        messages = self.product(x[sender], y, weights) * (1 + self.error)
        return messages.new_zeros(len(x), messages.shape[1]).index_add(0, receiver, messages)


def for_openequivariance(model: Any, error: float = 0.0) -> Any:
    converted = copy.deepcopy(model)
    for block in converted.interactions:
        block.conv_tp = with_oeq_conv_fusion(Theirs(block.conv_tp, error))
        block.conv_fusion = "atomic"
    return converted


def for_cuequivariance(model: Any, device: str = "cpu") -> Any:
    pytest.importorskip("cuequivariance_torch", reason="cuEquivariance is not installed")
    from mace.cli.convert_e3nn_cueq import run

    with default_dtype(next(model.parameters()).dtype):
        return run(copy.deepcopy(model), device=device)


CONVERSIONS = [for_cuequivariance, for_openequivariance]
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_converted_model_gets_the_convolution_and_keeps_the_rest(conversion: Callable[[Any], Any]) -> None:
    stock = model_of(numbers_in(imidazole()))
    batch = batch_of(stock, imidazole())
    model = conversion(stock)
    modules, fusion = dict(model.named_modules()), [getattr(one, "conv_fusion", None) for one in model.interactions]
    wanted, state = results(model, batch), model.state_dict()
    table = accelerate(model)
    assert str(table).startswith("2 of 2 convolutions")
    assert all(isinstance(block.conv_tp, ConvertedConvolution) for block in model.interactions)
    changed = [name for name, module in model.named_modules() if modules[name] is not module]
    assert "interactions.0.linear_up" not in changed and "interactions.0.conv_tp" in changed
    assert_same(results(model, batch), wanted)
    plain = results(stock, batch, training=False)
    assert_same(results(model, batch, training=False), plain)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(state)
    assert accelerate(model).replaced == 0
    assert restore(model) == table.replaced
    assert dict(model.named_modules()) == modules
    assert [getattr(one, "conv_fusion", None) for one in model.interactions] == fusion
    assert_same(results(model, batch), wanted)


@pytest.mark.parametrize("how", COPIES.values(), ids=COPIES)
def test_copies_and_conversions_keep_the_convolution(how: Callable[[Any], Any]) -> None:
    stock = model_of(numbers_in(imidazole()))
    batch = batch_of(stock, imidazole())
    model = for_cuequivariance(stock)
    accelerate(model)
    twin = how(model).eval().train()
    assert all(isinstance(block.conv_tp, ConvertedConvolution) for block in twin.interactions)
    assert_same(results(twin, batch, training=False), results(stock, batch, training=False))


def test_a_convolution_with_other_values_stays() -> None:
    model = for_openequivariance(model_of(numbers_in(imidazole())), error=1e-3)
    text = str(accelerate(model))
    assert text.startswith("0 of 2 convolutions") and "OpenEquivariance computes it: differs" in text
    assert all(isinstance(block.conv_tp, Theirs) and block.conv_fusion == "atomic" for block in model.interactions)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_on_a_gpu_the_fused_convolution_is_exchanged_too(dtype: torch.dtype) -> None:
    """There MACE's conversion makes gather, product and sum one call of cuEquivariance."""
    stock = model_of(numbers_in(imidazole()), dtype=dtype, hidden="32x0e+32x1o").cuda()
    batch = {name: value.cuda() for name, value in batch_of(stock, imidazole()).items()}
    wanted = results(stock, batch, training=False)
    model = for_cuequivariance(stock, device="cuda")
    assert all(block.conv_fusion is True for block in model.interactions)
    theirs = results(model, batch)
    assert str(accelerate(model)).startswith("2 of 2 convolutions")
    assert_same(results(model, batch, training=False), wanted)
    assert_same(results(model, batch), theirs)
    restore(model)
    assert all(block.conv_fusion is True for block in model.interactions)
    assert_same(results(model, batch), theirs)
