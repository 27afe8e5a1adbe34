"""What accelerate finds in a model, and says where it finds nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from e3nn import o3
from torch import Tensor

from autotune import accelerate, restore
from autotune.integrations.stand_ins import AcceleratedProduct
from kernelgen.errors import InputError


def product() -> o3.TensorProduct:
    return o3.TensorProduct("4x0e", "0e", "4x0e", [(0, 0, 0, "uvu", True)])


def test_a_module_under_two_names_of_one_parent_is_replaced_under_both() -> None:
    model = torch.nn.Module()
    model.a = model.b = original = product()
    table = accelerate(model)
    assert [(place.name, place.replaced) for place in table.places] == [("a", True), ("b", True)]
    assert model.a is model.b and isinstance(model.b, AcceleratedProduct)
    assert restore(model) == 2 and model.a is model.b is original


class Calls(torch.nn.Module):
    """Calls a product; what is left of it when TorchScript freezes it is no e3nn module."""

    def __init__(self) -> None:
        super().__init__()
        self.tp = product()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tp(x, y)


def test_the_table_says_why_a_model_has_nothing_to_replace() -> None:
    nothing = "0 of 0 e3nn tensor products replaced: "
    frozen = torch.jit.freeze(torch.jit.script(Calls().eval()))
    why = f"{nothing}TorchScript has compiled {{}}; accelerate the model before torch.jit.script"
    assert str(accelerate(frozen)).startswith(why.format("the model"))
    inside = torch.nn.ModuleDict({"energy": frozen})
    assert str(accelerate(inside)).startswith(why.format("energy"))
    traced = torch.fx.symbolic_trace(torch.nn.Linear(1, 1))
    assert str(accelerate(traced)).startswith(f"{nothing}the model is a graph of torch.fx; accelerate the model before")
    assert str(accelerate(torch.nn.Linear(1, 1))) == (
        f"{nothing}the model has no module of e3nn.o3.TensorProduct or e3nn.o3.SphericalHarmonics"
    )
    accelerated = Calls()
    accelerate(accelerated)
    assert str(accelerate(accelerated)) == f"{nothing}1 modules were replaced before"


@pytest.mark.parametrize("function", [accelerate, restore])
def test_what_is_no_module_is_refused(function: Callable[[object], object]) -> None:
    with pytest.raises(InputError, match=r"model is the path 'm\.pt'; expected .* load the file first"):
        function("m.pt")
    with pytest.raises(InputError, match=r"model is of type dict; expected a torch\.nn\.Module"):
        function({"tp.weight": torch.ones(1)})
