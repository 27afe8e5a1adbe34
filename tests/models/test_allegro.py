"""An accelerated Allegro model is the stock one: its strided products are kernels, weights and copies go on."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("allegro", reason="Allegro is not installed")

import model_checks
import weight_cases
from allegro.nn._strided import Contracter
from allegro_cases import CASE
from e3nn import o3
from fixed_kernels import take_few_edges, watched_launches
from model_cases import DTYPES, imidazole, mof, protein

from autotune.bench.contenders import build
from autotune.bench.session import errors_of, values_of
from autotune.errors import PeerError
from autotune.models.accelerate import accelerate, restore
from autotune.models.nequip.package import AcceleratedContracter
from autotune.models.package import default_dtype
from autotune.models.whole_model import WholeModel, package_of
from kernelgen.errors import UnsupportedError

TINY = {"l_max": 1, "num_tensor_features": 2, "num_scalar_features": 4, "parity": False}


def contracters(model: torch.nn.Module, kind: type[torch.nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("structure", "more"),
    [
        (imidazole, {}),
        (imidazole, {"num_layers": 3, "parity": False, "tp_path_channel_coupling": False}),
        (imidazole, {"num_layers": 1, "l_max": 1}),
        (mof, TINY),
        (protein, TINY),
    ],
    ids=["molecule", "no coupling", "one layer", "mof", "protein"],
)
def test_values_and_gradients_are_those_of_stock(structure: Any, more: dict[str, Any], dtype: torch.dtype) -> None:
    model_checks.check_values(CASE, structure(), dtype, 0, **more)


def test_every_product_is_replaced_and_put_back() -> None:
    model = CASE.build(imidazole())
    table = accelerate(model)
    assert contracters(model, AcceleratedContracter) == 2
    assert contracters(model, Contracter) == 0
    assert "2 of 2 tensor products" in str(table), str(table)
    restore(model)
    assert contracters(model, Contracter) == 2


@pytest.mark.parametrize("device", weight_cases.DEVICES)
def test_networks_of_edges_multiply_halves(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their errors are stock's in float32, in forces too; in TF32 they are far above."""
    take_few_edges(monkeypatch, device)
    launches = watched_launches(monkeypatch)
    wide = {"allegro_mlp_hidden_layers_width": 136, "allegro_mlp_hidden_layers_depth": 2}
    stock = CASE.build(imidazole(), torch.float32, **wide)
    exact = CASE.build(imidazole(), **wide)
    exact.load_state_dict(stock.state_dict())
    batch = {name: value.to(device) for name, value in CASE.batch(stock, imidazole()).items()}
    wanted = CASE.predict(exact.to(device), batch)
    errors = []
    for precision in (None, "float32", "tf32"):
        model = copy.deepcopy(stock).to(device)
        launches.clear()
        if precision is not None:
            accelerate(model, precision=precision)
        found = CASE.predict(model, batch)
        assert (launches.count("tall_halves") >= 8) == bool(precision)
        errors.append([float((found[name] - one).abs().max() / one.abs().max()) for name, one in wanted.items()])
    for of_stock, of_ours, of_tf32 in zip(*errors, strict=True):
        assert of_ours < 4 * of_stock + 1e-6 and of_tf32 > 1e-5, errors


@pytest.mark.parametrize(
    ("paths", "normalization"),
    [(None, "component"), ([(0, 0, 0)], "component"), ([(1, 1, 0), (0, 1, 1), (1, 1, 2)], None)],
    ids=["all paths", "one path", "some paths, no normalisation"],
)
def test_each_form_of_the_product(paths: Any, normalization: str | None) -> None:
    """A single path has weights with one index less. Values, first and second derivatives."""
    irreps = o3.Irreps("0e+1o"), o3.Irreps("0e+1o"), o3.Irreps("0e+1o+1e")
    node = torch.tensor([0, 2, 1, 1, 0, 2, 2])
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        stock = torch.nn.Module()
        stock.tp = Contracter(*irreps, 3, instructions=paths, irrep_normalization=normalization)
        x, y = torch.randn(7, 3 * 4, requires_grad=True), torch.randn(3, 3 * 4, requires_grad=True)
    fast = copy.deepcopy(stock)
    assert accelerate(fast).replaced == 1
    results = []
    for product in (stock.tp, fast.tp):
        given = (x, y, product.weights)
        out = product(x, y, node)
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), given)
        results.append((out, *first, *second))
    for wanted, found in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10 * float(wanted.detach().abs().max()))


def test_gathered_rows_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the forward pass to the backward pass, which gathers them again; so does one that has a graph."""
    holder, gathered, gather = torch.nn.Module(), [], torch.index_select
    holder.tp = Contracter(*[o3.Irreps("0e+1o")] * 3, 2)
    accelerate(holder)

    def watched(*arguments: Any) -> torch.Tensor:
        found = gather(*arguments)
        gathered.append(weakref.ref(found))
        return found

    monkeypatch.setattr(torch, "index_select", watched)
    x, y = torch.randn(50, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    seen: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: seen.append(one.shape) or one, lambda one: one):
        out = holder.tp(x, y, torch.arange(50) % 3)
    assert len(gathered) == 1 and gathered[0]() is None
    assert seen.count(x.shape) == 1, "hooks around it see the first input, and not the second"
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert len(gathered) == 2
    torch.autograd.grad(grad.sum(), (x, y))


def test_another_form_of_the_product_stays() -> None:
    class Other(Contracter):
        pass

    holder = torch.nn.Module()
    holder.tp = Other(*[o3.Irreps("0e")] * 3, 2)
    table = accelerate(holder)
    assert table.replaced == 0
    assert "it is a Other" in str(table)


def test_checkpoints_go_both_ways() -> None:
    model_checks.check_checkpoints(CASE, 0)


@pytest.mark.parametrize("device", weight_cases.DEVICES)
def test_weights_that_change_behind_the_model(device: str) -> None:
    weight_cases.check(CASE, device)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("put_back", [False, True])
def test_a_hook_that_makes_weights_may_be_removed_before_a_call(put_back: bool) -> None:
    """Until the first call only the original has the weights that the hook made."""
    model = CASE.build(imidazole())
    product = next(module for module in model.modules() if isinstance(module, Contracter))
    torch.nn.utils.weight_norm(product, "weights")
    product.weights_g.data.mul_(2)  # the hook has yet to see it
    wanted = 2 * product.weights.detach()
    accelerate(model)
    assert contracters(model, AcceleratedContracter) == 2
    if put_back:
        restore(model)
    else:
        product = next(module for module in model.modules() if isinstance(module, AcceleratedContracter))
    torch.nn.utils.remove_weight_norm(product, "weights")
    assert isinstance(product.weights, torch.nn.Parameter)
    torch.testing.assert_close(product.weights.detach(), wanted)
    assert dict(product.named_parameters()).keys() == {"weights"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_copy_of_a_model_with_weights_that_a_hook_made() -> None:
    """Torch copies no tensor with a gradient: none that ``accelerate`` made is kept beside that of the last call."""
    model = CASE.build(imidazole())
    for module in [module for module in model.modules() if isinstance(module, Contracter)]:
        torch.nn.utils.weight_norm(module, "weights")
    accelerate(model)
    assert contracters(model, AcceleratedContracter) == 2
    batch = CASE.batch(model, imidazole())
    wanted = CASE.predict(model.requires_grad_(False), batch)
    found = CASE.predict(copy.deepcopy(model), batch)
    torch.testing.assert_close(found, wanted)


def test_copies_keep_equitune(tmp_path: Path) -> None:
    model_checks.check_copies(CASE, 0, tmp_path)


def test_training_with_an_average_of_weights() -> None:
    model_checks.check_training(CASE)


def test_torchscript_is_refused() -> None:
    model = CASE.build(imidazole())
    accelerate(model)
    with pytest.raises(UnsupportedError, match="TorchScript"):
        torch.jit.script(model)


@pytest.mark.slow
def test_stock_compiled_by_aotinductor_gives_stocks_values() -> None:
    """The contender of rows of models."""
    atoms = mof()
    model = CASE.build(atoms, **TINY)
    stock = WholeModel("small", model, package_of(model))
    compiled, _ = build("stock-aotinductor", stock)
    for structure in (atoms, atoms.repeat((2, 1, 1))):
        inputs = stock.inputs([structure])
        exact = values_of(stock, inputs, "energy_forces", {}, True)
        errors, _ = errors_of(values_of(compiled, inputs, "energy_forces", {}, True), exact)
        assert set(errors) == {"energy", "forces", "stress"} and max(errors.values()) < 1e-5
    with pytest.raises(PeerError, match="no gradients of weights"):
        compiled.training_step(inputs)
