"""A whole model accelerated: same values, gradients, training and checkpoints as e3nn's, and back again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from e3nn import o3
from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork
from reference import copied, float64
from torch import Tensor

from autotune.models import stand_ins
from autotune.models.accelerate import accelerate, restore
from autotune.models.stand_ins import AcceleratedProduct
from autotune.modules.product import TensorProduct
from kernelgen.errors import InputError, ProblemError
from kernelgen.problem.product import TensorProductProblem, problem_of

IRREPS = ("6x0e+3x1o", "0e+1o", "6x0e+3x1o+6x1o")
PATHS = [(0, 0, 0, "uvu", True), (0, 1, 2, "uvu", True, 0.5), (1, 0, 1, "uvu", True), (1, 1, 1, "uvw", True)]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64():
        yield


def product(**options: object) -> o3.TensorProduct:
    return o3.TensorProduct(*IRREPS, PATHS[:3], **options)


class Doubled(o3.TensorProduct):
    def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        return 2 * super().forward(x, y, weight)


class Model(torch.nn.Module):
    """Weights of the edge, weights of its own, a module used twice, a fully connected one, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.first = product(shared_weights=False)
        self.inner = torch.nn.ModuleDict({"own": o3.TensorProduct(IRREPS[0], "0e+1o", IRREPS[0], PATHS[:1])})
        self.again = self.inner["own"]
        self.last = o3.FullyConnectedTensorProduct(IRREPS[2], "0e+1o", "2x0e")
        self.doubled = Doubled(IRREPS[0], "0e+1o", IRREPS[0], PATHS[:1])

    def forward(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(self.again(self.inner["own"](self.doubled(x, y), y), y), y, w), y)


def inputs(model: Model) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = (15, 4, model.first.weight_numel)
    return [torch.randn(9, size, generator=generator).requires_grad_() for size in sizes]


def results(model: Model) -> list[torch.Tensor]:
    given = inputs(model)
    out = model(*given)
    return [out, *torch.autograd.grad(out.square().sum(), [*given, *model.parameters()])]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())


def test_values_and_gradients_are_e3nns_and_restore_puts_its_modules_back() -> None:
    model = Model()
    wanted, before, parameters = results(model), dict(model.named_modules()), dict(model.named_parameters())
    table = accelerate(model)
    assert {place.name: place.replaced for place in table.places} == {
        "first": True, "inner.own": True, "again": True, "last": True, "doubled": False,
    }  # fmt: skip
    assert model.again is model.inner["own"] and isinstance(model.again, AcceleratedProduct)
    assert_same(results(model), wanted)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert accelerate(model).replaced == 0
    assert restore(model) == 4
    assert dict(model.named_modules()) == before
    assert_same(results(model), wanted, 0)


def test_the_table_names_every_product_and_why_it_stays() -> None:
    model = Model()
    text = str(accelerate(model))
    assert text.startswith(
        "4 of 5 tensor products replaced\nreplaced  first, again, last, inner.own\n          schedule "
    )
    assert ("\nkept      doubled\n          Doubled has a forward of its own\n") in text


def test_checkpoints_go_both_ways() -> None:
    plain, model = Model(), Model()
    accelerate(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    assert_same(results(model), results(plain))
    other = Model()
    other.load_state_dict(model.state_dict())
    assert_same(results(other), results(plain), 0)
    assigned = Model()
    accelerate(assigned)
    assigned.load_state_dict(plain.state_dict(), assign=True)
    assert_same(results(assigned), results(plain))


def test_checkpoints_hold_the_constants_of_e3nns_code() -> None:
    """Irreps beyond scalars have some, which e3nn misses where they are not there."""
    size = dict(max_radius=3.0, num_neighbors=3.0, num_nodes=5.0, mul=2, layers=1, lmax=1)
    plain, model = (SimpleNetwork(irreps_in="3x0e+1o", irreps_out="0e+1o", **size) for _ in range(2))
    assert any("_w3j" in name for name in plain.state_dict())
    assert accelerate(model).replaced
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


def test_another_weight_is_the_originals_too() -> None:
    model = holding(product())
    accelerate(model)
    (place,) = [child for child in model.modules() if isinstance(child, AcceleratedProduct)]
    place.weight = torch.nn.Parameter(torch.ones_like(place.weight))
    assert all(bool((tensor == 1).all()) for name, tensor in model.state_dict().items() if name.endswith("weight"))
    model.double()
    assert place.weight.dtype is torch.float64 and bool((place.weight == 1).all())
    model.eval()
    restore(model)
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_work_and_share_nothing(how: str) -> None:
    model = Model()
    accelerate(model)
    wanted = results(model)
    twin = copied(model, how)
    assert_same(results(twin), wanted)
    with torch.no_grad():
        twin.again.weight.zero_()
    assert_same(results(model), wanted)
    assert restore(twin) == 4 and not twin.again.weight.any()


def test_conversion_of_dtype_reaches_the_module_that_waits() -> None:
    model = Model()
    accelerate(model)
    model.float()
    out = model(*(tensor.float() for tensor in inputs(model)))
    assert out.dtype == model.again.weight.dtype == model.again.output_mask.dtype == torch.float32
    restore(model)
    assert model.again.weight.dtype == model.again.output_mask.dtype == torch.float32


NORMALIZED: list[Callable[[], o3.TensorProduct]] = [
    *(
        lambda irrep=irrep, path=path: o3.TensorProduct(
            *IRREPS, PATHS[:1] + PATHS[2:3], irrep_normalization=irrep, path_normalization=path
        )
        for irrep in ("component", "norm", "none")
        for path in ("element", "path", "none")
    ),
    lambda: product(in1_var=[2.0, 3.0], in2_var=[1.0, 0.5], out_var=[1.0, 4.0, 0.1]),
]


@pytest.mark.parametrize("make", NORMALIZED)
def test_every_normalisation_is_found_again(make: Callable[[], o3.TensorProduct]) -> None:
    original = make()
    problem = problem_of(original)
    coefficients = [i.path_weight for i in problem.reference().instructions]
    assert coefficients == pytest.approx([i.path_weight for i in original.instructions], rel=1e-12)


def test_the_usual_products_are_filed_as_they_were_tuned() -> None:
    tuned = TensorProductProblem.channelwise("128x0e+128x1o", "0e+1o+2e+3o", "0e+1o+2e+3o")
    paths = [(p.in1, p.in2, p.out, "uvu", True) for p in tuned.instructions]
    module = o3.TensorProduct(tuned.irreps_in1, tuned.irreps_in2, tuned.irreps_out, paths, shared_weights=False)
    assert problem_of(module) == tuned


def test_attributes_and_weights_are_taken_as_e3nn_takes_them() -> None:
    model = Model()
    x, y, w = inputs(model)
    wanted = model.first(x, y, w)
    original = model.first
    accelerate(model)
    sizes = [i.path_shape[0] for i in original.instructions]
    assert_same([model.first(x, y, list(w.split(sizes, -1)))], [wanted])
    assert [view.shape for view in model.first.weight_views(w)] == [view.shape for view in original.weight_views(w)]
    assert model.first.output_mask is original.output_mask
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = model.first.nothing_like_it


def test_the_constructor_takes_what_e3nn_takes_in_its_order() -> None:
    variances = ([2.0, 3.0], torch.tensor([1.0, 0.5]), [1.0, 4.0, 0.1])
    arguments = (*IRREPS, PATHS[:3], *variances, "norm", "path", False, True, True, False)
    ours, theirs = TensorProduct(*arguments), o3.TensorProduct(*arguments)
    x, y, _ = inputs(Model())
    w = torch.randn(theirs.weight_numel)
    assert_same([ours(x, y, w)], [theirs(x, y, w)])
    assert ours.instructions == theirs.instructions
    assert_same([ours.weight_view_for_instruction(1, w)], [theirs.weight_view_for_instruction(1, w)], 0)
    found, wanted = (list(tp.weight_views(w, yield_instruction=True)) for tp in (ours, theirs))
    assert [a[:2] for a in found] == [b[:2] for b in wanted]
    with pytest.warns(DeprecationWarning):
        assert TensorProduct(*IRREPS, PATHS[:3], normalization="none").problem.irrep_normalization == "none"


def test_the_right_method_is_e3nns() -> None:
    model = holding(product(compile_right=True))
    y = torch.randn(5, 2, 4)
    wanted = model["tp"].right(y)
    assert accelerate(model).replaced == 1
    assert_same([model["tp"].right(y)], [wanted])
    per_edge = product(shared_weights=False, compile_right=True)
    ours, w = TensorProduct(*IRREPS, PATHS[:3], shared_weights=False), torch.randn(5, 1, per_edge.weight_numel)
    assert_same([ours.right(y, w)], [per_edge.right(y, w)])


def test_weights_of_wrong_shapes_are_refused() -> None:
    module = TensorProduct(*IRREPS, PATHS[:3], internal_weights=False)
    x, y, _ = inputs(Model())
    with pytest.raises(RuntimeError, match="weight is missing"):
        module(x, y)
    with pytest.raises(InputError, match=r"have shape \(4, 1\)"):
        module(x, y, [torch.ones(6, 1), torch.ones(6, 1), torch.ones(4, 1)])
    with pytest.raises(InputError, match="expected 3, one a path"):
        module(x, y, [torch.ones(6, 1)])


def test_variances_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ProblemError, match="one variance for each block"):
        TensorProduct(*IRREPS, PATHS[:3], in1_var=[1.0])


def holding(module: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({"tp": module})


def test_what_cannot_be_replaced_stays_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: torch.nn.Module) -> str:
        table = accelerate(model)
        assert table.replaced == 0
        return table.places[0].detail

    assert "build an autotune.TensorProduct" in kept(product())
    assert kept(holding(Doubled(*IRREPS, PATHS[:3]))) == "Doubled has a forward of its own"
    assert "accelerate the model before torch.jit.script" in kept(holding(torch.jit.script(product())))
    assert "float16" in kept(holding(product().half()))
    assert "left_right" in kept(holding(product(compile_left_right=False, compile_right=True)))
    assert "parametrizations" in kept(holding(torch.nn.utils.parametrizations.weight_norm(product())))
    more, changed = product(), product()
    more.scale = torch.nn.Parameter(torch.ones(1))
    assert kept(holding(more)).endswith("of its own: scale")
    changed.forward = lambda x, y: x
    assert "has a forward of its own" in kept(holding(changed))
    assert "torch.compile holds it" in kept(torch.nn.ModuleList([torch.compile(product())]))
    monkeypatch.setattr(stand_ins, "problem_of", lambda module: problem_of(product(irrep_normalization="none")))
    assert "differs from e3nn by" in kept(holding(product()))


def energy_and_forces(model: torch.nn.Module, position: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
    given = position.clone().requires_grad_()
    energy = model({"pos": given, "x": feature})
    (gradient,) = torch.autograd.grad(energy.sum(), given, create_graph=True)
    return energy, -gradient


def train(model: torch.nn.Module, position: Tensor, feature: Tensor) -> list[float]:
    """20 losses on energy and forces."""
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(20):
        energy, forces = energy_and_forces(model, position, feature)
        loss = (energy - 1).square().sum() + (forces - position).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gate_points_network_trains_the_same(device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    size = {"max_radius": 4.0, "num_neighbors": 5.0, "num_nodes": 6.0, "mul": 8, "layers": 2, "lmax": 1}
    model = SimpleNetwork(irreps_in="3x0e", irreps_out="1x0e", **size).to(device, dtype)
    position, feature = (torch.randn(6, 3).to(device, dtype) for _ in range(2))
    fast = copy.deepcopy(model)
    assert accelerate(fast).replaced == 17
    losses, wanted = train(fast, position, feature), train(model, position, feature)
    # Each step adds to what rounding made of the steps before it.
    assert losses == pytest.approx(wanted, rel=20 * tolerance)
    assert losses[-1] < losses[0]
    fast.load_state_dict(model.state_dict())
    # Of the trained network: at the start its convolutions weigh nothing, and the forces are zero.
    results = (energy_and_forces(either, position, feature) for either in (fast, model))
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm() > 0
