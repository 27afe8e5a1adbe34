"""What torch does to a module it can do to a stand-in, and e3nn's module has it when it is put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from e3nn import o3
from reference import copied, float64
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune

from autotune.models.accelerate import accelerate, restore
from autotune.models.replace import retype, take_type_back
from autotune.models.stand_ins import StandIn
from autotune.modules.product import TensorProduct

IRREPS = ("4x0e+2x1o", "0e+1o", "4x0e+2x1o")
PATHS = [(0, 0, 0, "uvu", True), (0, 1, 1, "uvw", True), (1, 0, 1, "uvu", True)]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tp = o3.TensorProduct(*IRREPS, PATHS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.tp(x, y)


def pair() -> tuple[Model, Model]:
    """A model of e3nn's and an accelerated one with the same weights."""
    plain = Model()
    fast = copy.deepcopy(plain)
    assert accelerate(fast).replaced == 1
    return plain, fast


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(5, size, generator=generator) for size in (10, 4)]


def results(model: torch.nn.Module) -> list[Tensor]:
    """The value and the gradients of all parameters."""
    out = model(*inputs())
    return [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]


def assert_same(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    names, wanted = ([name for name, _ in either.named_parameters()] for either in (model, plain))
    assert names == wanted
    assert set(model.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(results(model), results(plain), rtol=1e-10, atol=1e-12)


class Doubled(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Squashed(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def spectral(module: torch.nn.Module) -> object:
    """Its start is random."""
    torch.manual_seed(3)
    return parametrizations.spectral_norm(module)


def old_spectral(module: torch.nn.Module) -> object:
    torch.manual_seed(3)
    return torch.nn.utils.spectral_norm(module)


CHANGES: dict[str, Callable[[torch.nn.Module], object]] = {
    "parametrized": lambda module: parametrize.register_parametrization(module, "weight", Squashed()),
    "parametrized twice": lambda module: [
        parametrize.register_parametrization(module, "weight", change()) for change in (Doubled, Squashed)
    ],
    "weight norm": parametrizations.weight_norm,
    "spectral norm": spectral,
    "weight norm by a hook": torch.nn.utils.weight_norm,
    "spectral norm by a hook": old_spectral,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "pruned twice": lambda module: [prune.l1_unstructured(module, "weight", 0.3) for _ in range(2)],
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_weight_may_be_parametrized_and_pruned(change: Callable[[torch.nn.Module], object]) -> None:
    """As e3nn's would be: results, gradients, names, conversion, copies; and so it is put back."""
    plain, fast = pair()
    for model in (plain, fast):
        change(model.tp)
    assert isinstance(fast.tp, StandIn)
    assert_same(fast, plain)
    before = dict(fast.named_parameters())
    assert restore(fast) == 1 and not isinstance(fast.tp, StandIn)
    assert all(parameter is before[name] for name, parameter in fast.named_parameters())
    assert_same(fast, plain)
    fast.float()
    assert fast(*(tensor.float() for tensor in inputs())).dtype is torch.float32


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_a_changed_class_is_taken_back_from_under_a_parametrization(first: bool) -> None:
    """A block whose class ``accelerate`` changed, one of whose tensors is parametrized before or after that."""
    place = "torch.nn.modules.linear:NonDynamicallyQuantizableLinear"
    module = torch.nn.Linear(3, 2)
    if first:
        parametrize.register_parametrization(module, "weight", Squashed())
    retype(module, place)
    if not first:
        parametrize.register_parametrization(module, "weight", Squashed())
    copied, x = copy.deepcopy(module), torch.randn(4, 3)
    wanted = module(x)
    assert take_type_back(module, place) and not take_type_back(module, place)
    assert not any("NonDynamically" in kind.__name__ for kind in type(module).__mro__)
    assert any("NonDynamically" in kind.__name__ for kind in type(copied).__mro__)
    for one in (module, copied):
        assert torch.equal(one(x), wanted) and parametrize.is_parametrized(one, "weight")


def test_a_parametrized_stand_in_is_converted_trained_saved_and_loaded() -> None:
    plain, fast = pair()
    for model in (plain, fast):
        parametrize.register_parametrization(model.tp, "weight", Doubled())
        with torch.no_grad():
            model.tp.weight = torch.ones_like(model.tp.weight)
        assert bool((model.tp.parametrizations["weight"].original == 0.5).all())
        model.float().double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        results(model)
        model(*inputs()).square().sum().backward()
        optimizer.step()
    assert_same(fast, plain)
    _, other = pair()
    parametrize.register_parametrization(other.tp, "weight", Doubled())
    other.load_state_dict(plain.state_dict())
    assert_same(other, plain)
    assert_same(copy.deepcopy(fast), plain)


def test_parametrizations_and_pruning_may_be_removed_before_and_after() -> None:
    plain, fast = pair()
    for model in (plain, fast):
        parametrize.register_parametrization(model.tp, "weight", Squashed())
        parametrize.remove_parametrizations(model.tp, "weight")
        prune.l1_unstructured(model.tp, "weight", 0.5)
        prune.remove(model.tp, "weight")
        prune.l1_unstructured(model.tp, "weight", 0.7)
    assert type(fast.tp.weight) is Tensor
    restore(fast)
    for model in (plain, fast):
        prune.remove(model.tp, "weight")
        parametrize.register_parametrization(model.tp, "weight", Squashed())
    assert_same(fast, plain)
    assert restore(fast) == 0


def test_a_parametrization_that_fails_is_not_taken_for_a_missing_attribute() -> None:
    """The original is asked for what is missing, and must not answer with a weight of its own."""

    class Broken(torch.nn.Module):
        ready = False

        def forward(self, weight: Tensor) -> Tensor:
            return weight if not self.ready else self.nowhere  # type: ignore[return-value]

    _, fast = pair()
    broken = Broken()
    parametrize.register_parametrization(fast.tp, "weight", broken)
    broken.ready = True
    with pytest.raises(AttributeError):
        fast(*inputs())


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_called_and_go_over_when_the_original_is_put_back(when: str) -> None:
    model, called = Model(), list[str]()

    def register(module: torch.nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        module.register_forward_hook(lambda module, args, kwargs, out: called.append("after"), with_kwargs=True)
        module.register_state_dict_post_hook(lambda *_: called.append("save"))
        module.register_load_state_dict_pre_hook(lambda module, *_: called.append(type(module).__name__))
        module.register_load_state_dict_post_hook(lambda *_: called.append("loaded"))
        return [
            module.register_forward_pre_hook(lambda *_: called.append("before")),
            module.register_full_backward_hook(lambda *_: called.append("backward")),
        ]

    def calls() -> list[str]:
        called.clear()
        model(*(tensor.requires_grad_() for tensor in inputs())).sum().backward()
        model.load_state_dict(model.state_dict())
        return list(called)

    module = model.tp
    if when == "before":
        handles = register(module)
        assert accelerate(model).replaced == 1 and called == []
    else:
        accelerate(model)
        handles = register(model.tp)
    owner = "TensorProduct" if when == "before" else "AcceleratedProduct"
    assert calls() == ["before", "after", "backward", "save", owner, "loaded"]
    restore(model)
    assert model.tp is module
    assert calls() == ["before", "after", "backward", "save", "TensorProduct", "loaded"]
    for handle in handles:
        handle.remove()
    assert calls() == ["after", "save", "TensorProduct", "loaded"]


def test_hooks_of_harmonics_go_over_too() -> None:
    model = torch.nn.Sequential(o3.SphericalHarmonics([0, 1], True))
    accelerate(model)
    called: list[int] = []
    model[0].register_forward_hook(lambda *_: called.append(1))
    model(torch.randn(4, 3))
    restore(model)
    model(torch.randn(4, 3))
    assert called == [1, 1] and isinstance(model[0], o3.SphericalHarmonics)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_and_its_original_share_what_they_share(how: str) -> None:
    plain, fast = pair()
    twin = copied(fast, how)
    for model in (plain, twin):
        prune.l1_unstructured(model.tp, "weight", 0.5)
    restore(twin)
    assert_same(twin, plain)
    assert "weight" in dict(fast.tp.named_parameters())


def test_a_module_that_was_added_stays() -> None:
    _, fast = pair()
    fast.tp.scale = torch.nn.Linear(1, 1)
    restore(fast)
    assert list(dict(fast.tp.named_modules())["scale"].parameters())


def test_parametrizations_of_a_product_built_for_a_model() -> None:
    """Not only of stand-ins."""
    plain, ours = o3.TensorProduct(*IRREPS, PATHS), TensorProduct(*IRREPS, PATHS)
    ours.load_state_dict(plain.state_dict())
    for module in (plain, ours):
        parametrize.register_parametrization(module, "weight", Squashed())
    assert_same(ours, plain)
    assert_same(copy.deepcopy(ours), plain)
