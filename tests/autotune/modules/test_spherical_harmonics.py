"""``autotune.SphericalHarmonics`` and ``spherical_harmonics`` in the place of e3nn's: modules, graphs, whole models."""

from __future__ import annotations

import io
import itertools
import re

import pytest
import torch
from e3nn import o3
from reference import copied, float64

import autotune
from autotune.models import replace as replacement
from autotune.models.accelerate import accelerate, restore
from autotune.models.stand_ins import AcceleratedHarmonics, AcceleratedProduct
from autotune.modules.rows import SphericalHarmonics, spherical_harmonics
from kernelgen.errors import InputError, ProblemError, UnsupportedError
from kernelgen.problem.other_kinds import NORMALIZATIONS

OUTPUTS = [
    3,
    [0, 1, 2],
    [4, 1, 1],
    (2, 0),
    "0e + 1o + 2e + 3o",
    "2x0e + 3x1e + 2e",
    o3.Irreps("1e + 2x4e"),
    o3.Irreps.spherical_harmonics(5),
    12,
]
# Every output with raw and with normalised vectors, one of them slow; the three normalisations by turns.
CASES = [
    pytest.param(
        *(irreps_out, normalize, NORMALIZATIONS[number % 3]),
        marks=[] if number // 2 % 2 == number % 2 else [pytest.mark.slow],
        id=f"{irreps_out}-{normalize}-{NORMALIZATIONS[number % 3]}",
    )
    for number, (irreps_out, normalize) in enumerate(itertools.product(OUTPUTS, (True, False)))
]


def points(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert float((found - wanted).detach().abs().max()) <= tolerance * float(wanted.detach().abs().max())


@pytest.mark.parametrize(("irreps_out", "normalize", "normalization"), CASES)
def test_values_attributes_and_text_are_e3nns(irreps_out: object, normalize: bool, normalization: str) -> None:
    x = points(4, 5)
    ours = SphericalHarmonics(irreps_out, normalize, normalization)
    theirs = o3.SphericalHarmonics(irreps_out, normalize, normalization)
    with float64():
        assert_close(ours(x), theirs(x))
    for name in ("irreps_in", "irreps_out", "normalize", "normalization", "_ls_list", "_lmax", "_is_range_lmax"):
        assert getattr(ours, name) == getattr(theirs, name), name
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    assert repr(ours) == repr(theirs) and list(ours.state_dict()) == list(theirs.state_dict()) == []
    assert_close(spherical_harmonics(irreps_out, x, normalize, normalization), ours(x), 0)


@pytest.mark.parametrize("irreps_out", ["2x0e + 3x1e + 2e", 10])
def test_single_precision(irreps_out: object) -> None:
    x = points(4, 5, dtype=torch.float32)
    assert_close(SphericalHarmonics(irreps_out, True)(x), o3.SphericalHarmonics(irreps_out, True)(x), 1e-5)


def test_the_default_normalisation_is_e3nns() -> None:
    x, wanted = points(4, 5), o3.SphericalHarmonics([0, 1, 2], True)(points(4, 5))
    assert_close(SphericalHarmonics([0, 1, 2], True)(x), wanted)
    assert_close(spherical_harmonics([0, 1, 2], x, True), wanted)


def test_derivatives_are_e3nns() -> None:
    results = []
    for module in (
        SphericalHarmonics([0, 1, 2, 3], True, "component"),
        o3.SphericalHarmonics([0, 1, 2, 3], True, "component"),
    ):
        x = points(6).requires_grad_()
        weight = torch.linspace(-1, 1, 16, dtype=torch.float64)
        energy = (module(x) * weight).sum(-1).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        (second,) = torch.autograd.grad(force.square().sum(), x)
        results.append((force.detach(), second))
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize(
    "irreps_out, irreps_in", [([1, 2], "1e"), ("1e + 2e", "1e"), ("1o", o3.Irreps("1o")), (3, "1x1e"), ("2e", "1e")]
)
def test_the_parity_of_the_input_is_taken_as_e3nn_takes_it(irreps_out: object, irreps_in: object) -> None:
    ours = SphericalHarmonics(irreps_out, True, "norm", irreps_in)
    theirs = o3.SphericalHarmonics(irreps_out, True, "norm", irreps_in)
    assert ours.irreps_in == theirs.irreps_in and ours.irreps_out == theirs.irreps_out
    assert_close(ours(points(3)), theirs(points(3)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1o + 2o", True), "2o has parity -1, but harmonics of degree 2 of an input of parity -1 have parity 1"),
        (("1e", True, "norm", "1o"), "change the parity in irreps_out, or irreps_in"),
        (("1o", True, "norm", "2x1o"), r"irreps_in is 2x1o; expected a vector \(1x1o\)"),
        (("1o", True, "norm", "0e"), "irreps_in is 1x0e"),
        (("1o", True, "norm", "one"), "irreps_in: 'one' is not an irreps string"),
        (("l=3", True), "irreps_out: 'l=3' is not an irreps string"),
        ((2, True, "unit"), "normalization is 'unit'; choose one of"),
        ((2.5, True), "irreps_out is 2.5; expected a degree, a list of degrees or irreps"),
        (([], True), r"degrees is \(\)"),
        ((-1, True), r"degrees is \(-1,\)"),
    ],
)
def test_what_is_not_well_defined_is_said(arguments: tuple, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        SphericalHarmonics(*arguments)
    with pytest.raises((ValueError, AssertionError, TypeError, IndexError, RuntimeError)):
        o3.SphericalHarmonics(*arguments)(points(2))


def test_as_many_degrees_as_e3nn_has() -> None:
    with pytest.raises(UnsupportedError, match="degree 13; harmonics are generated up to degree 12, as e3nn's are"):
        SphericalHarmonics(13, True)
    with pytest.raises(NotImplementedError):
        o3.SphericalHarmonics(13, True)


def test_other_inputs_are_refused() -> None:
    module = SphericalHarmonics(2, True)
    with pytest.raises(InputError, match="x is torch.float16; expected torch.float32 or torch.float64"):
        module(points(2).half())
    with pytest.raises(InputError, match=r"\(2, 4\) on cpu; expected torch.float32 \(..., 3\)"):
        module(torch.zeros(2, 4))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str) -> None:
    module, x = SphericalHarmonics("0e + 1o", True, "component"), points(3)
    wanted = module(x)
    twin = copied(module, how)
    assert twin is not module and torch.equal(twin(x), wanted)
    assert twin.irreps_out == module.irreps_out


def test_the_schedule_is_the_default_and_says_so() -> None:
    module = SphericalHarmonics(3, True)
    before = module.tuning
    module(points(2, dtype=torch.float32))
    assert module.tuning == before and set(before) == {"forward", "backward", "double_backward"}
    assert {(t.origin, t.entry) for t in before.values()} == {("default", None)}
    assert "using the default schedule" in before["forward"].reason


def test_opcheck() -> None:
    module, ops = SphericalHarmonics([0, 1, 2], True), torch.ops.equitune
    module(points(2))
    text = module._operator.text
    v = points(4).requires_grad_()
    g = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    t = points(4) + 1
    torch.library.opcheck(ops.sh_forward, (v, text))
    torch.library.opcheck(ops.sh_backward, (v, g, text))
    torch.library.opcheck(ops.sh_backward, (v, g.detach(), text))
    for outputs in ("xg", "x", "g"):
        torch.library.opcheck(ops.sh_double_backward, (v.detach(), g.detach(), t, outputs, text))


def test_the_ops_differentiate_as_eager_calls_do() -> None:
    module = SphericalHarmonics([0, 1, 2], False)
    module(points(2))
    operator, found = module._operator, []
    for function in (operator, lambda v: torch.ops.equitune.sh_forward(v, operator.text)):
        v, w = points(4).requires_grad_(), torch.ones(9, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad((function(v).square() * w).sum(), v, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.square().sum(), (v, w))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_fake_tensors_have_shapes_and_run_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = SphericalHarmonics([0, 1], True)
    with FakeTensorMode():
        v = torch.empty(7, 2, 3, requires_grad=True)
        out = module(v)
        (gradient,) = torch.autograd.grad(out.sum(), v, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), v)
    assert out.shape == (7, 2, 4) and gradient.shape == second.shape == (7, 2, 3)


def test_compiles_as_one_graph_for_any_number_of_vectors() -> None:
    torch.compiler.reset()
    module = SphericalHarmonics([0, 1, 2, 3], True, "component")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for shape in ((5,), (9,), (2, 6)):
        results = []
        for function in (module, compiled):
            x = points(*shape).requires_grad_()
            out = function(x)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum() + out.sum(), x)])
        assert_close(results[1][0], results[0][0], 0)
        assert_close(results[1][1], results[0][1], 1e-14)


def test_compiled_modules_are_not_taken_for_each_other() -> None:
    """torch.compile keeps its code by class: what differs must be asked for."""
    torch.compiler.reset()
    for arguments in ((2, True, "norm"), (2, True, "component"), (2, False, "norm"), ([1, 0, 0], True, "norm")):
        module = SphericalHarmonics(*arguments)
        assert_close(torch.compile(module, fullgraph=True)(points(4)), module(points(4)), 0)


def test_the_function_compiles() -> None:
    torch.compiler.reset()

    def energy(x: torch.Tensor, normalization: str) -> torch.Tensor:
        return spherical_harmonics("1o + 2e", x, True, normalization)

    for normalization in ("norm", "component"):
        found = torch.compile(energy, fullgraph=True)(points(4), normalization)
        assert_close(found, o3.spherical_harmonics("1o + 2e", points(4), True, normalization))


def test_exports_saves_and_loads_with_the_number_of_vectors_left_open() -> None:
    module = SphericalHarmonics([0, 1, 2], True)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(module, (points(5),), dynamic_shapes=({0: rows},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for made in (exported.module(), torch.export.load(file).module()):
        for count in (5, 12):
            assert torch.equal(made(points(count)), module(points(count)))


class Model(torch.nn.Module):
    """Harmonics of edges, once shared, feed a product; one module has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sh = o3.SphericalHarmonics("0e + 1o + 2e", True, "component")
        self.inner = torch.nn.ModuleDict({"same": self.sh, "raw": o3.SphericalHarmonics([1], False)})
        self.tp = o3.FullyConnectedTensorProduct("0e + 1o + 2e", "1o", "4x0e")
        self.mine = Halved(1, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp(self.sh(x) + self.inner["same"](2 * x), self.inner["raw"](x) + self.mine(x))


class Halved(o3.SphericalHarmonics):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def step(model: Model) -> list[torch.Tensor]:
    """Energy, forces and gradients of a loss on both."""
    x = points(6).requires_grad_()
    energy = model(x).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return [energy, force, *torch.autograd.grad(energy + force.square().sum(), [x, *model.parameters()])]


def test_a_model_accelerates_and_comes_back() -> None:
    with float64():
        model = Model()
        wanted, before = step(model), dict(model.named_modules())
        table = accelerate(model)
        assert {place.name: place.replaced for place in table.places} == {
            "sh": True, "inner.same": True, "inner.raw": True, "tp": True, "mine": False,
        }  # fmt: skip
        assert isinstance(model.sh, AcceleratedHarmonics) and model.inner["same"] is model.sh
        assert isinstance(model.tp, AcceleratedProduct) and table.replaced == 4
        for found, expected in zip(step(model), wanted, strict=True):
            assert_close(found, expected)
        assert accelerate(model).replaced == 0
        assert restore(model) == 4 and dict(model.named_modules()) == before
        for found, expected in zip(step(model), wanted, strict=True):
            assert_close(found, expected, 0)


def test_the_table_names_harmonics_and_why_they_stay() -> None:
    text = str(accelerate(Model()))
    assert text.startswith("1 of 1 tensor products and 3 of 4 spherical harmonics replaced\n")
    assert re.search(r"^replaced  .*\bsh\b.*\n +schedule [\w-]+: .*tuned", text, re.MULTILINE)
    assert "\nkept      mine\n          Halved has a forward of its own" in text


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_an_accelerated_model_is_copied(how: str) -> None:
    model = torch.nn.Sequential(o3.SphericalHarmonics([0, 1], True))
    wanted, keys = model(points(3)), list(model.state_dict())
    model.eval()
    assert accelerate(model).replaced == 1 and not model[0].training
    twin = copied(model, how)
    assert_close(twin(points(3)), wanted)
    assert list(twin.state_dict()) == keys and twin[0]._prof_str == "spherical_harmonics([0, 1])"
    assert restore(twin) == 1 and type(twin[0]) is o3.SphericalHarmonics


def test_what_cannot_be_replaced_stays_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: torch.nn.Module) -> str:
        table = accelerate(model)
        assert table.replaced == 0
        return table.places[0].detail

    harmonics = o3.SphericalHarmonics([0, 1], True)
    assert "wrap it in a module, or build an autotune.SphericalHarmonics" in kept(harmonics)
    assert "before torch.jit.script" in kept(torch.nn.Sequential(torch.jit.script(harmonics)))
    half = torch.nn.Sequential(harmonics, torch.nn.Linear(4, 1)).half()
    assert "float16" in kept(half)
    assert accelerate(half, check=False).replaced == 1
    monkeypatch.setattr(replacement.AcceleratedHarmonics, "forward", lambda self, x: 1.001 * self.original(x))
    assert "differs from e3nn by 1.0e-03" in kept(torch.nn.Sequential(harmonics))


def test_both_names_load_when_they_are_asked_for() -> None:
    assert {"SphericalHarmonics", "spherical_harmonics"} <= set(autotune.__all__) & set(dir(autotune))
