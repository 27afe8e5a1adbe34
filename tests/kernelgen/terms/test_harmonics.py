"""Emitted harmonics, compiled for the host, against e3nn and autograd; their keys, errors and operation counts."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e3nn import o3
from harmonics_reference import operands, reference, vectors, worst
from hypothesis import given
from hypothesis import strategies as st

from kernelgen.arithmetic.harmonics import Body, harmonics_body
from kernelgen.compile.compiler import compile_source
from kernelgen.compile.gpu import nvrtc_version
from kernelgen.compile.host import find_host_compiler
from kernelgen.device import cuda_facts
from kernelgen.errors import ProblemError, ToolMissingError
from kernelgen.kernels.source import Source
from kernelgen.problem.other_kinds import NORMALIZATIONS, HarmonicsProblem

TOLERANCE = 1e-11
ALL = tuple(range(7))
# The outputs that each compiled function has: (name, direction, outputs of double_backward).
FORMS = {
    "forward": ("forward", ("x", "g")),
    "backward": ("backward", ("x", "g")),
    "both": ("double_backward", ("x", "g")),
    "only_x": ("double_backward", ("x",)),
    "only_g": ("double_backward", ("g",)),
}
BUFFERS = {"vx": "v", "tx": "t", "g_": "g", "og_": "og", "ox": "ox"}
# Unused variables are errors, so a name in `reads` that nothing reads is one; so is double arithmetic among floats.
FLAGS = ("-O1", "-std=c++17", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wdouble-promotion", "-Werror")


def place(name: str, row: int) -> str:
    """``g_5`` of vector i lies at ``g[16 * i + 5]``."""
    stem, number = re.fullmatch(r"([a-z]+_?)(\d+)", name).groups()
    return f"{BUFFERS[stem]}[{3 if stem[-1] == 'x' else row} * i + {number}]"


def function(name: str, body: Body, row: int) -> str:
    """A loop over vectors; outputs are locals that start as given and are stored at the end."""
    outputs = (*body.writes, *body.accumulates)
    lines = [
        *(f"const Real {read} = {place(read, row)};" for read in body.reads),
        *(f"Real {out} = {place(out, row)};" for out in outputs),
        *body.statements,
        *(f"{place(out, row)} = {out};" for out in outputs),
    ]
    given = "const Real* v, const Real* t, Real* g, Real* ox, Real* og"
    unused = "(void)v, (void)t, (void)g, (void)ox, (void)og;"
    loop = "".join(f"        {line}\n" for line in lines)
    head = f'extern "C" void {name}(long n, {given}) {{\n    {unused}\n    for (long i = 0; i < n; ++i) {{\n'
    return f"{head}{loop}    }}\n}}\n"


class Compiled:
    """The five functions of a problem in a shared library; tensors in, tensors out."""

    def __init__(self, problem: HarmonicsProblem, folder: Path, dtype: torch.dtype = torch.float64) -> None:
        self.row, self.dtype = problem.dim_out, dtype
        source = folder / "harmonics.cpp"
        text = "\n".join(function(name, harmonics_body(problem, *form), self.row) for name, form in FORMS.items())
        source.write_text(f"#include <math.h>\nusing Real = {'double' if dtype == torch.float64 else 'float'};\n{text}")
        compiler = find_host_compiler()
        command = [compiler.path, *compiler.arguments, *FLAGS, str(source), "-o", str(source.with_suffix(".so"))]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.library = ctypes.CDLL(str(source.with_suffix(".so")))

    def __call__(
        self, name: str, v: torch.Tensor, t: torch.Tensor, g: torch.Tensor, start: float = 0.0
    ) -> tuple[torch.Tensor, ...]:
        """(g, ox, og) after the function. Before it ox is ``start`` and what is assigned is nan."""
        g = torch.full_like(g, torch.nan) if name == "forward" else g.clone()
        ox, og = torch.full_like(v, start), torch.full_like(g, torch.nan)
        tensors = (v.contiguous(), t.contiguous(), g, ox, og)
        assert all(tensor.dtype == self.dtype and tensor.shape[1] in (3, self.row) for tensor in tensors)
        getattr(self.library, name)(ctypes.c_long(len(v)), *(ctypes.c_void_p(x.data_ptr()) for x in tensors))
        return g, ox, og


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Compiled]:
    """Compiles a problem once for all tests of this file."""
    return functools.lru_cache(maxsize=None)(
        lambda problem, dtype=torch.float64: Compiled(problem, tmp_path_factory.mktemp("harmonics"), dtype)
    )


GRADIENT = (1,)
CASES = [
    *(HarmonicsProblem(ALL, *form) for form in itertools.product(NORMALIZATIONS, (True, False))),
    *(HarmonicsProblem((degree,), "component", normalize) for degree in range(13) for normalize in (True, False)),
    *(HarmonicsProblem(tuple(range(13)), "integral", normalize) for normalize in (True, False)),
    *(HarmonicsProblem((12, 7, 4, 9), "norm", normalize) for normalize in (True, False)),
    *(HarmonicsProblem((2, 0, 3, 2, 1, 1), "component", normalize) for normalize in (True, False)),
]
# The compiler takes code of high degrees long.
EVERY_CASE = pytest.mark.parametrize(
    "problem",
    [pytest.param(case, marks=pytest.mark.slow if max(case.degrees) > 7 else ()) for case in CASES],
    ids=lambda problem: problem.key,
)


@EVERY_CASE
def test_values_and_both_derivatives_are_those_of_e3nn(
    problem: HarmonicsProblem, compiled: Callable[..., Compiled]
) -> None:
    v = vectors()
    t, g = operands(problem, v)
    values, first, second_v, second_g = reference(problem, v, t, g)
    kernel = compiled(problem)
    assert worst(kernel("forward", v, t, g)[0], values, problem.degrees) < TOLERANCE
    assert worst(kernel("backward", v, t, g)[1], first, GRADIENT) < TOLERANCE
    _, ox, og = kernel("both", v, t, g)
    assert worst(ox, second_v, GRADIENT) < TOLERANCE
    assert worst(og, second_g, problem.degrees) < TOLERANCE


@EVERY_CASE
def test_one_output_of_the_second_derivative_is_as_with_the_other(
    problem: HarmonicsProblem, compiled: Callable[..., Compiled]
) -> None:
    v, kernel = vectors(), compiled(problem)
    t, g = operands(problem, v)
    _, ox, og = kernel("both", v, t, g)
    _, only_ox, no_og = kernel("only_x", v, t, g)
    _, no_ox, only_og = kernel("only_g", v, t, g)
    assert worst(only_ox, ox, GRADIENT) < 1e-14 and worst(only_og, og, problem.degrees) < 1e-14
    assert no_og.isnan().all() and (no_ox == 0).all()
    only_g = harmonics_body(problem, "double_backward", ("g",))
    assert not [name for name in only_g.reads if name.startswith("g_")]


@EVERY_CASE
def test_zero_vectors(problem: HarmonicsProblem, compiled: Callable[..., Compiled]) -> None:
    v = torch.zeros(4, 3, dtype=torch.float64)
    t, g = operands(problem, v)
    values, first, second_v, second_g = reference(problem, v, t, g)
    if problem.normalize:
        # torch's norm has no second derivative here: nan, except for l = 0, which does not depend on v.
        assert second_v.isnan().all() if problem.l_max else (second_v.isnan() | (second_v == 0)).all()
        second_v = torch.zeros_like(v)
    kernel = compiled(problem)
    assert worst(kernel("forward", v, t, g)[0], values, problem.degrees) < TOLERANCE
    assert worst(kernel("backward", v, t, g)[1], first, GRADIENT) < TOLERANCE
    _, ox, og = kernel("both", v, t, g)
    assert worst(ox, second_v, GRADIENT) < TOLERANCE
    assert worst(og, second_g, problem.degrees) < TOLERANCE


def test_vectors_shorter_than_torchs_threshold_are_zero_vectors(compiled: Callable[..., Compiled]) -> None:
    problem = HarmonicsProblem(ALL, "component", True)
    zero = torch.zeros(3, 3, dtype=torch.float64)
    short = torch.tensor([[0, 9e-13, 0], [5e-13, -5e-13, 5e-13], [1e-200, 0, 0]], dtype=torch.float64)
    t, g = operands(problem, zero)
    for name in FORMS:
        for a, b in zip(compiled(problem)(name, short, t, g), compiled(problem)(name, zero, t, g), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    assert compiled(problem)("forward", 2.5 * short[:1], t[:1], g[:1])[0].abs().amax() > 1


@pytest.mark.parametrize("normalize", [True, False])
def test_a_nan_stays_one(normalize: bool, compiled: Callable[..., Compiled]) -> None:
    problem = HarmonicsProblem(ALL, "component", normalize)
    v = torch.full((1, 3), torch.nan, dtype=torch.float64)
    t, g = operands(problem, v)
    assert compiled(problem)("forward", v, t, g)[0][:, 1:].isnan().all()
    assert compiled(problem)("backward", v, t, g)[1].isnan().all()
    _, ox, og = compiled(problem)("both", v, t, g)
    assert ox.isnan().all() and og[:, 4:].isnan().all()


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_added_to_what_is_there(normalize: bool, compiled: Callable[..., Compiled]) -> None:
    problem, v = HarmonicsProblem(ALL, "component", normalize), vectors()[30:40]
    t, g = operands(problem, v)
    for name in ("backward", "both", "only_x"):
        alone, added = (compiled(problem)(name, v, t, g, start)[1] for start in (0.0, 3.0))
        torch.testing.assert_close(added, alone + 3, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("normalize", [True, False])
def test_single_precision(normalize: bool, compiled: Callable[..., Compiled]) -> None:
    problem, v = HarmonicsProblem(ALL, "component", normalize), vectors()[25:35]
    t, g = operands(problem, v)
    single = (v.float(), t.float(), g.float())
    v, t, g = (tensor.double() for tensor in single)
    for name, (number, degrees) in {"forward": (0, ALL), "backward": (1, GRADIENT), "both": (1, GRADIENT)}.items():
        found = compiled(problem, torch.float32)(name, *single)[number]
        assert 0 < worst(found.double(), compiled(problem)(name, v, t, g)[number], degrees) < 1e-5


@pytest.mark.parametrize("problem", [case for case in CASES if case.normalization == "component"], ids=lambda p: p.key)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_no_statement_is_dead_and_all_names_are_told(problem: HarmonicsProblem, form: tuple) -> None:
    body = harmonics_body(problem, *form)
    outputs, used, declared = {*body.writes, *body.accumulates}, set(), []
    for statement in body.statements:
        target, operator, expression = re.fullmatch(r"(.+?) ([+-]?=) (.+);", statement).groups()
        name = target.split()[-1]
        names = set(re.findall(r"\b(?!Real\b|sqrt\b)[a-z]\w*", re.sub(r"Real\([^)]*\)", "", expression)))
        assert names <= {*body.reads, *declared, *body.writes}, f"undeclared in {statement}"
        first = name not in declared
        assert (len(target.split()) > 1) == (first and name not in outputs), f"{name} is declared or it is the caller's"
        assert (operator == "=") == (first and name not in body.accumulates), f"{name} is set once, or added to"
        used |= names
        declared.append(name)
    assert set(declared) - outputs <= used, "set and never used"
    assert set(body.reads) <= used, "listed and never read"


def operations(problem: HarmonicsProblem, *form: object) -> int:
    """Multiplications, additions and subtractions; a sign inside a number is none."""
    statements = " ".join(harmonics_body(problem, *form).statements)
    return len(re.findall(r"[-+*]", re.sub(r"Real\([^)]*\)", "", statements)))


# forward, backward, double_backward with both outputs, with x only, with g only. Unit vectors also take one square
# root and one division.
OPERATIONS = {
    (1, True): (11, 28, 62, 59, 25),
    (2, True): (24, 52, 128, 108, 44),
    (3, True): (42, 93, 221, 186, 78),
    (4, True): (66, 148, 339, 283, 124),
    (6, True): (136, 299, 649, 533, 251),
    (1, False): (3, 6, 3, 0, 3),
    (2, False): (20, 35, 55, 28, 27),
    (3, False): (40, 92, 170, 107, 77),
    (4, False): (67, 167, 330, 234, 143),
    (6, False): (141, 376, 786, 594, 328),
}


@pytest.mark.parametrize("l_max, normalize", OPERATIONS)
def test_operation_counts(l_max: int, normalize: bool) -> None:
    problem = HarmonicsProblem(tuple(range(l_max + 1)), "component", normalize)
    assert tuple(operations(problem, *form) for form in FORMS.values()) == OPERATIONS[l_max, normalize]


@pytest.mark.parametrize("normalize", [True, False])
def test_a_repeated_degree_is_computed_once(normalize: bool) -> None:
    once, twice = (HarmonicsProblem(degrees, "component", normalize) for degrees in ((1, 3), (3, 1, 3)))
    assert operations(once, "forward") == operations(twice, "forward")
    assert operations(once, "double_backward", ("g",)) == operations(twice, "double_backward", ("g",))
    # The cotangents of the two copies are added first: 7 additions.
    assert operations(once, "backward") + 7 == operations(twice, "backward")


def test_a_degree_that_was_not_asked_for_costs_a_unit_vector_nothing() -> None:
    profile = r"\bf[pz]*[0-5]_"
    alone, together = (
        " ".join(harmonics_body(HarmonicsProblem(degrees, "component", True), "double_backward").statements)
        for degrees in ((6,), ALL)
    )
    assert re.search(profile, together) and not re.search(profile, alone)


def test_a_constant_needs_and_adds_nothing() -> None:
    problem = HarmonicsProblem((0,), "norm", True)
    assert harmonics_body(problem, "forward") == Body(("g_0 = Real(1.0);",), (), ("g_0",), ())
    assert harmonics_body(problem, "backward") == Body((), (), (), ())
    assert harmonics_body(problem, "double_backward") == Body(("og_0 = Real(0.0);",), (), ("og_0",), ())


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).map(tuple), st.sampled_from(NORMALIZATIONS), st.booleans())
def test_keys_come_back(degrees: tuple[int, ...], normalization: str, normalize: bool) -> None:
    problem = HarmonicsProblem(degrees, normalization, normalize)
    assert HarmonicsProblem.from_key(problem.key) == problem
    assert problem.dim_out == o3.Irreps([(1, (degree, 1)) for degree in degrees]).dim
    assert problem.l_max == max(degrees)


def test_the_text_of_a_key_is_stable() -> None:
    assert HarmonicsProblem((0, 1, 2, 3), "component", True).key == "sh|0,1,2,3|component|normalize"
    assert HarmonicsProblem((10, 2, 2), "integral", False).key == "sh|10,2,2|integral|raw"
    assert HarmonicsProblem([1, 2], "norm", True) == HarmonicsProblem((1, 2), "norm", True)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "sh",
        "sh||norm|raw",
        "sh|1,|norm|raw",
        "sh|01|norm|raw",
        "uvu|1|norm|raw",
        "sh|1|norm|unit",
        "sh|-1|norm|raw",
    ],
)
def test_other_texts_are_no_keys(key: str) -> None:
    with pytest.raises(ProblemError, match="not a key of harmonics"):
        HarmonicsProblem.from_key(key)


@pytest.mark.parametrize(
    "fields, message",
    [
        (((), "norm", True), r"degrees is \(\); expected one or more integers of 0..12"),
        (((0, 13), "norm", True), r"degrees is \(0, 13\)"),
        (((-1,), "norm", True), r"degrees is \(-1,\)"),
        (((1.0,), "norm", True), r"degrees is \(1.0,\)"),
        (((True,), "norm", True), r"degrees is \(True,\)"),
        ((3, "norm", True), r"degrees is 3;.*for example \(0, 1, 2\)"),
        (("12", "norm", True), r"degrees is '12'"),
        (((1,), "unit", True), r"normalization is 'unit'; choose one of"),
        (((1,), "norm", 1), r"normalize is 1; pass True"),
    ],
)
def test_errors_say_what_was_given_and_what_to_pass(fields: tuple, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        HarmonicsProblem(*fields)


def test_unknown_directions_and_outputs() -> None:
    problem = HarmonicsProblem((1,), "norm", True)
    with pytest.raises(ProblemError, match="direction is 'sideways'; choose one of"):
        harmonics_body(problem, "sideways")
    for outputs in ((), ("x", "y")):
        with pytest.raises(ProblemError, match="outputs are .*; choose 'x', 'g' or both"):
            harmonics_body(problem, "double_backward", outputs)


def test_statements_compile_for_a_gpu() -> None:
    try:
        nvrtc_version()
    except ToolMissingError as error:
        pytest.skip(str(error))
    problem = HarmonicsProblem(ALL, "component", True)
    text = function("kernel", harmonics_body(problem, "double_backward"), problem.dim_out)
    text = "using Real = float;\n" + text.replace("void kernel(", "__global__ void kernel(", 1)
    binary = compile_source(Source(text, "cuda", "kernel"), cuda_facts("sm_90"))
    assert binary.resources["registers"] > 0 and binary.resources["spill_bytes"] == 0
