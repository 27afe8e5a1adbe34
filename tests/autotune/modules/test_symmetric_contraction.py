"""``autotune.SymmetricContraction``: its values, its schedules by the number of nodes, compiled, copied, recorded."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
import torch

from autotune import SymmetricContraction
from autotune.database import misses
from autotune.database.lookup import Tuning
from autotune.database.misses import read_misses
from autotune.errors import TuningMissError
from autotune.modules.base import Found, Lookup
from autotune.modules.rows import TunedContraction
from autotune.tune.model_passes import needs_of, recorded, workloads_for
from autotune.workload.graphs import NodesAlone
from kernelgen import device_facts
from kernelgen.arithmetic.contraction import CONTRACTION_DIRECTIONS
from kernelgen.arithmetic.contraction_couplings import polynomials
from kernelgen.errors import InputError, ProblemError
from kernelgen.ops.base import OPERATORS, resolve
from kernelgen.ops.symmetric_contraction import ContractionOperator, build_contraction
from kernelgen.problem.other_kinds import ContractionProblem

NODES, ELEMENTS = 40, 5


def made(layout: str = "mul_ir", **options: object) -> SymmetricContraction:
    torch.manual_seed(0)
    given = {"layout": layout, "dtype": torch.float64, **options}
    return SymmetricContraction("4x0e+4x1o", "4x0e+4x1o", 2, ELEMENTS, **given)


def inputs(layout: str = "mul_ir", nodes: int = NODES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(nodes, 4, 4, generator=generator, dtype=torch.float64)
    elements = torch.randint(ELEMENTS, (nodes,), generator=generator)
    return (x if layout == "mul_ir" else x.mT.contiguous()).requires_grad_(), elements


def step(module: SymmetricContraction, x: torch.Tensor, elements: torch.Tensor) -> list[torch.Tensor]:
    """Value, gradient, and the gradient of a loss on it with respect to the weights."""
    value = module(x, elements)
    (first,) = torch.autograd.grad(value.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), module.weight)
    return [value.detach(), first.detach(), second]


def test_values_are_the_operators_in_both_layouts() -> None:
    x, elements = inputs()
    module, other = made(), made("ir_mul")
    value = build_contraction(module.problem, dtype=torch.float64, layout="mul_ir")(
        x.flatten(1), module.weight, elements
    )
    assert torch.equal(module(x, elements), value) and torch.equal(module(x.flatten(1), elements), value)
    turned = other(x.mT.contiguous(), elements)
    # Scalars, then vectors: [component, channel] here, [channel, component] in mul_ir.
    back = torch.cat([turned[:, :4], turned[:, 4:].view(-1, 3, 4).mT.flatten(1)], 1)
    assert float((back - value).detach().abs().max()) < 1e-12


def test_attributes_and_text() -> None:
    module = made()
    assert (str(module.irreps_in), str(module.irreps_out)) == ("4x0e+4x1o", "4x0e+4x1o")
    assert module.weight.shape == (ELEMENTS, len(polynomials(module.problem)), 4)
    assert "correlation 2 | 5 elements | 5 weights a channel" in repr(module)
    told = SymmetricContraction("0e+1o", "0e+1o", 2, ELEMENTS, channels=4)
    assert told.problem == module.problem == ContractionProblem("0e+1o", "0e+1o", 2, 4)
    # Two polynomials of degree 2 are scalars, one is of degree 1.
    assert module.weight[:, 0].std() > 1.3 * module.weight[:, 1:3].std()


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        (("4x0e", "8x0e", 2, 5), {}, "expected one multiplicity, or channels"),
        (("4x0e", "4x0e", 2, 5), {"channels": 8}, "irreps_in is 4x0e; expected the multiplicity 8"),
        (("4x0e", "4x0e", 2, 0), {}, "num_elements is 0; expected a positive integer"),
        (("4x0e", "4x0e", 5, 5), {}, "correlation is 5; expected an integer of 1..4"),
        (("4x0e", "4x0e", 2, 5), {"layout": "rows"}, "layout is 'rows'"),
        (("4x0e", "4x0e", 2, 5), {"num_nodes": 0}, "num_nodes is 0; expected a positive integer"),
    ],
)
def test_what_does_not_fit_is_said(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        SymmetricContraction(*arguments, **options)


def test_wrong_tensors_are_refused() -> None:
    module, (x, elements) = made(), inputs()
    with pytest.raises(InputError, match="w is torch.float64 .*; expected torch.float32"):
        module(x.float(), elements)
    with pytest.raises(InputError, match="elements is"):
        module(x, elements[1:])
    with pytest.raises(InputError, match=r"x is torch.bfloat16; expected torch.float32"):
        module(x.bfloat16(), elements)


def test_autocast_computes_in_single_precision() -> None:
    module, (x, elements) = made(dtype=torch.float32), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x.bfloat16(), elements)
    assert found.dtype is torch.float32 and torch.equal(found, module(x.bfloat16().float(), elements))


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_compiled_and_copied_modules_give_the_same(layout: str) -> None:
    module, (x, elements) = made(layout), inputs(layout)
    wanted = step(module, x, elements)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(step(other, x, elements), wanted, strict=True))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, elements), wanted[0])
    value = compiled(x, elements)
    (first,) = torch.autograd.grad(value.square().sum(), x)
    assert torch.equal(first, wanted[1])


def test_exported_module_takes_any_number_of_nodes() -> None:
    module = made()
    nodes = torch.export.Dim("nodes", min=2, max=1000)
    exported = torch.export.export(module, inputs(), dynamic_shapes=({0: nodes}, {0: nodes})).module()
    for count in (NODES, 77):
        assert torch.equal(exported(*inputs(nodes=count)), module(*inputs(nodes=count)))


def test_each_number_of_nodes_takes_its_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and traced calls choose alike, the latter by a family that any process can rebuild."""
    module, facts = made(), device_facts("cpu")
    small = {name: tasks(module, name, 2) for name in CONTRACTION_DIRECTIONS}
    large = {name: tasks(module, name, 16) for name in CONTRACTION_DIRECTIONS}
    asked: list[int | None] = []

    def find(lookup: object, graph_class: object) -> Found:
        asked.append(getattr(graph_class, "log2_edges", None))
        chosen = small if asked[-1] is not None and asked[-1] <= 6 else large
        return Found({name: made_tuning(schedule) for name, schedule in chosen.items()}, {})

    monkeypatch.setattr(Lookup, "find", find)
    module(*inputs(nodes=40))
    assert asked == [5] and module._operator.schedules == small
    module(*inputs(nodes=45))
    assert asked == [5]  # the same size class
    module(*inputs(nodes=300))
    assert asked == [5, 8] and module._operator.schedules == large
    text = module._operator_text(module._key, torch.device("cpu"), torch.float64)
    for family in (OPERATORS[text], pickle.loads(pickle.dumps(OPERATORS.pop(text)))):
        assert isinstance(family, ContractionOperator) and family.text == text
        assert family.for_size(60).schedules == small and family.for_size(10**6).schedules == large
    assert resolve(text).widths == module._operator.widths and facts.backend == "cpu"


def tasks(module: SymmetricContraction, name: str, nodes: int) -> object:
    operator = build_contraction(module.problem, dtype=torch.float64, layout="mul_ir")
    return dataclasses.replace(operator.schedules[name], nodes_per_task=nodes)


def made_tuning(schedule: object) -> object:
    return Tuning(schedule, "given", None, "made up")


def test_what_runs_is_recorded_with_a_graph_to_tune_on() -> None:
    module, (x, elements) = made(), inputs()
    with recorded() as recording:
        step(module, x, elements)
    kinds = {(r.operation, r.direction, r.dtype, r.layout, r.graph_class.text) for r in recording.requests}
    names = tuple(CONTRACTION_DIRECTIONS)
    assert kinds == {("contraction", name, "float64", "mul_ir", "contraction-e5") for name in names}
    assert set(recording.requests.values()) == {NodesAlone(NODES)}
    needs = needs_of(recording.requests, device_facts("cpu"))
    (workload,) = workloads_for(needs, "batch")
    assert workload.directions == names and workload.problem == module.problem and workload.num_edges == NODES


def test_misses_are_kept(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUITUNE_MISSES", "1")
    monkeypatch.setattr(misses, "WATCHED_S", 1e6)
    misses._notes.forget()
    try:
        module, (x, elements) = made(), inputs()
        step(module, x, elements)
    finally:
        misses._notes.write()
        misses._notes.forget()
    found = read_misses(device_facts("cpu"))
    assert {request.direction for request in found} == set(CONTRACTION_DIRECTIONS)
    assert {(request.problem, request.num_edges) for request in found} == {(module.problem.key, NODES)}


def test_strict_asks_for_tuned_schedules() -> None:
    with pytest.raises(TuningMissError, match="no tuned contraction forward float64"):
        made(strict=True)(*inputs())
    assert {found.origin for found in made().tuning.values()} == {"default"}
    assert made(num_nodes=NODES)._key[1] == "contraction-e5"


def test_weights_of_the_caller() -> None:
    module, (x, elements) = made(), inputs()
    plain = TunedContraction(module.problem)
    assert not list(plain.parameters()) and plain.num_weights == module.num_weights
    w = torch.ones(2, plain.num_weights, 4, dtype=torch.float64)
    assert plain.contract(x, w, elements % 2).shape == (NODES, 16)
    assert plain.operator_for(torch.device("cpu"), torch.float64, NODES).problem == module.problem
