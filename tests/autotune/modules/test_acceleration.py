"""What accelerate finds in a model, and says where it finds nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e3nn import o3
from torch import Tensor

from autotune.models import radial
from autotune.models.accelerate import _OLD, accelerate, restore
from autotune.models.capture import ModelState
from autotune.models.linear import AcceleratedLinear
from autotune.models.stand_ins import AcceleratedProduct, Acceleration, Place
from kernelgen.errors import InputError, UnsupportedError


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
    nothing = "0 of 0 tensor products replaced: "
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


class AOTICompiledModel:
    """Of torch's name: what it loads from a compiled file is no module."""


def test_a_compiled_file_says_what_to_do() -> None:
    wrapper = torch.nn.Module()
    wrapper.model = AOTICompiledModel()
    text = str(accelerate(Calculator(model=wrapper)))
    assert text.startswith(
        "0 of 0 tensor products replaced: AOTInductor has compiled the model, which keeps its kernels"
    )
    assert "nequip-compile --modifiers enable_Equitune" in text and "open the checkpoint that it was made from" in text


OLD = {
    "edge_weights": {
        "streamed": "memory='low'",
        "auto": "leave it out",
        "whole": "memory='auto'",
        "fused": "memory='auto'",
    },
    "edge_product": {"tf32": "precision='tf32'", "fp16x3": "leave it out", "float32": "leave it out"},
    "edge_network": {"fused": "leave it out", "layers": "leave it out"},
}


@pytest.mark.parametrize("option", OLD)
def test_old_spellings_work_and_name_the_new_one(option: str) -> None:
    for value, instead in OLD[option].items():
        with pytest.warns(FutureWarning, match=f"{option}='{value}' is an old spelling.*{instead}") as caught:
            assert accelerate(Calls(), **{option: value}).replaced == 1
        assert [Path(one.filename).name for one in caught] == [Path(__file__).name]
        with pytest.raises(InputError, match=f"{option} is 'none'; expected one of {', '.join(_OLD[option])}"):
            accelerate(Calls(), **{option: "none"})


def test_new_spellings_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    for options in ({}, {"memory": "low"}, {"precision": "float32", "memory": "auto"}):
        accelerate(Calls(), **options)
    assert not [one for one in recwarn if one.category is FutureWarning]


def test_options_that_are_not_offered() -> None:
    with pytest.raises(InputError, match="precision is 'fp8'; expected one of float32, tf32"):
        accelerate(Calls(), precision="fp8")
    with pytest.raises(InputError, match="memory is 'none'; expected one of auto, low"):
        accelerate(Calls(), memory="none")
    with pytest.raises(UnsupportedError, match="precision='bf16' is not offered: kernels read and write float32"):
        accelerate(Calls(), precision="bf16")
    for options in ({"memory": "low", "edge_weights": "whole"}, {"precision": "tf32", "edge_product": "float32"}):
        with pytest.raises(InputError, match="are both given; expected (memory|precision) alone"):
            accelerate(Calls(), **options)


def test_the_line_says_the_precision() -> None:
    line = accelerate(Calls(), precision="tf32").line
    assert (
        line == "1 of 1 tensor products replaced, tf32 means nothing without an NVIDIA GPU: products stay float32 here"
    )
    line = accelerate(Calls().double(), precision="tf32").line
    assert line.endswith("replaced, tf32 means nothing for a model in float64, whose products stay float64")
    assert accelerate(Calls()).line == "1 of 1 tensor products replaced"
    table = Acceleration((), note="a note", precision="tf32 in 2 modules")
    assert table.line == str(table) == "0 of 0 tensor products replaced, tf32 in 2 modules: a note"


def test_layers_that_give_energies_are_never_in_tf32() -> None:
    wide, narrow = (AcceleratedLinear(o3.Linear("32x0e", irreps)) for irreps in ("32x0e", "1x0e"))
    model = torch.nn.ModuleList([wide, narrow])
    assert radial.choose_arithmetic(model, "tf32", True, in_tf32=True) == 1
    assert wide.form.kernel.in_tf32 and not narrow.form.kernel.in_tf32
    before = ModelState(model)
    assert radial.choose_arithmetic(model, "fp16x3", True, in_tf32=False) == 0
    assert not wide.form.kernel.in_tf32 and not before.is_still()


def test_one_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.ModuleDict({"energy": Calls(), "charge": Calls()})
    model["charge"].tp.right = None  # a method of its own
    with caplog.at_level(logging.INFO, "equitune"):
        done = accelerate(model)
    (record,) = caplog.records
    assert record.getMessage() == f"ModuleDict: {done.line}"
    assert done.line == "1 of 2 tensor products replaced; stock: charge.tp"
    many = Acceleration(tuple(Place(f"{number}.tp", "", False, "") for number in range(9)))
    assert many.line.endswith("; stock: 0.tp, 1.tp, 2.tp, 3.tp, 4.tp, 5.tp and 3 more")


def test_the_table_says_what_will_be_refused() -> None:
    model = Calls()
    assert str(accelerate(model)).splitlines()[-2] == "refused   third derivatives, TorchScript"
    with pytest.raises(UnsupportedError, match="TorchScript"):
        torch.jit.script(model)
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(2, 1, requires_grad=True)
    found = model(x, y).square().sum()
    with pytest.raises(UnsupportedError, match="third derivatives"):
        for _ in range(3):
            (gradient,) = torch.autograd.grad(found, x, create_graph=True)
            found = gradient.square().sum()


@pytest.mark.parametrize("function", [accelerate, restore])
def test_what_is_no_module_is_refused(function: Callable[[object], object]) -> None:
    with pytest.raises(InputError, match=r"model is the path 'm\.pt'; expected .* load the file first"):
        function("m.pt")
    with pytest.raises(InputError, match=r"model is of type dict; expected a torch\.nn\.Module, or an object with one"):
        function({"tp.weight": torch.ones(1)})
    with pytest.raises(InputError, match=r"model is of type Calculator; expected a torch\.nn\.Module, or"):
        function(Calculator(models=[Calls(), "file.model"]))


class Calculator:
    """Holds modules, as the calculators of ASE do."""

    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


@pytest.mark.parametrize("held", ["model", "models", "committee"])
def test_the_modules_of_a_calculator_are_replaced(held: str) -> None:
    modules = [Calls(), Calls()][: 2 if held == "committee" else 1]
    calculator = Calculator(model=modules[0]) if held == "model" else Calculator(models=modules)
    names = [f"{number}.tp" for number in range(2)] if held == "committee" else ["tp"]
    assert [place.name for place in accelerate(calculator).places] == names
    assert all(isinstance(module.tp, AcceleratedProduct) for module in modules)
    assert restore(calculator) == len(modules)
    assert not any(isinstance(module.tp, AcceleratedProduct) for module in modules)


def test_places_with_one_reason_share_its_line() -> None:
    reason, other = "schedule default: nothing is tuned", "Mine has a forward of its own"
    places = (
        Place("harmonics", "", True, reason, "spherical harmonics"),
        Place("0.skip", "", True, reason),
        Place("1.skip", "", False, other),
        Place("0.conv", "", True, reason, "convolutions"),
    )
    assert str(Acceleration(places)) == (
        "1 of 1 convolutions, 1 of 2 tensor products and 1 of 1 spherical harmonics replaced\n"
        f"replaced  0.conv, 0.skip, harmonics\n          {reason}\nkept      1.skip\n          {other}\n"
        "refused   third derivatives, TorchScript\n          autotune.restore(model) makes the model stock again"
    )


@pytest.mark.parametrize(("attributes", "stays"), [("12x0e", True), ("12x0e+1x1o", False), ("2x0e", False)])
def test_self_connections_stay_where_e3nn_is_faster(attributes: str, stays: bool) -> None:
    model = torch.nn.Module()
    model.sc = o3.FullyConnectedTensorProduct("64x0e", attributes, "64x0e")
    (place,) = accelerate(model).places
    assert place.replaced != stays
    assert ("e3nn's own code is faster here" in place.detail) == stays
    assert type(model.sc) is (o3.FullyConnectedTensorProduct if stays else AcceleratedProduct)
