"""Calls of captured models that fail, are interrupted, or give and ask for more than a captured step knows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from autotune.models import capture as package
from autotune.models.capture import CapturedModel, capture
from autotune.models.neighbors import AtomicGraph
from autotune.models.package import Package
from autotune.models.padding import Counts, Field, Fields, PaddedStep, ghost_ends, ghost_pointer
from kernelgen.errors import InputError, UnsupportedError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZE = Counts(40, 200, 3)
GOOD, OTHER = Counts(10, 30, 2), Counts(20, 60, 2)


def fields_of(real: Counts) -> dict[str, Field]:
    generator = torch.Generator().manual_seed(real.edges)
    edges = torch.randint(real.atoms, (2, real.edges), generator=generator)
    batch = torch.arange(real.atoms) * real.graphs // real.atoms
    return {
        "positions": Field(torch.randn(real.atoms, 3, generator=generator), "atoms", 0.0, each=(3,)),
        "elements": Field(torch.ones(real.atoms, 2), "atoms", torch.tensor([1, 0]), each=(2,)),
        "batch": Field(batch, "atoms", real.graphs, below="graphs"),
        "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
        "cell": Field(torch.randn(3 * real.graphs, 3, generator=generator), "graphs", torch.eye(3), rows=3, each=(3,)),
        "ptr": Field(torch.arange(real.graphs + 1), "graphs", ghost_pointer, extra=1),
    }


FIELDS = list(fields_of(GOOD))


def copied(given: dict[str, Tensor], size: Counts) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in given.items()}


def step(device: str) -> PaddedStep:
    rows = {"positions": "atoms", "elements": "atoms", "batch": "atoms"}
    return PaddedStep(SIZE, fields_of(GOOD), torch.device(device), copied, rows)


class Fault(Exception):
    pass


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_that_ends_in_the_middle_is_not_believed(device: str, name: str, error: type[BaseException]) -> None:
    def end(*_: Any) -> Tensor:
        raise error

    used, fresh = step(device), step(device)
    used(fields_of(GOOD), GOOD)
    fields = fields_of(OTHER)
    with pytest.raises(error):
        used({**fields, name: fields[name]._replace(ghost=end)}, OTHER)
    assert used.filled is None
    for one in (used, fresh):
        one(fields_of(GOOD), GOOD)
    for buffer in FIELDS:
        assert torch.equal(used.buffers[buffer], fresh.buffers[buffer]), buffer


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_one_row_is_not_broadcast(name: str) -> None:
    fields = fields_of(OTHER)
    field = fields[name]
    one = field._replace(tensor=field.tensor.narrow(field.axis, 0, 1))
    expected = f"{name} has 1 rows; expected {field.length(OTHER)} for a graph of 20 atoms, 60 edges and 2 structures"
    with pytest.raises(InputError, match=expected):
        step("cpu")({**fields, name: one}, OTHER)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_another_shape_is_refused(name: str) -> None:
    fields = fields_of(OTHER)
    field = fields[name]._replace(tensor=fields[name].tensor.unsqueeze(-1))
    with pytest.raises(InputError, match=f"{name} is of shape .*, 1.; expected .*{field.per}"):
        PaddedStep(SIZE, {**fields, name: field}, torch.device("cpu"), copied, {})


@pytest.mark.parametrize(("name", "add"), [("edge_index", 19), ("edge_index", -1), ("batch", 1), ("batch", -1)])
def test_indices_of_ghosts_are_refused(name: str, add: int) -> None:
    """There are 40 atoms and 3 structures in the buffers; what is given has 20 and 2."""
    fields = fields_of(OTHER)
    moved = fields[name]._replace(tensor=fields[name].tensor + add)
    with pytest.raises(InputError, match=f"{name} has indices from "):
        step("cpu")({**fields, name: moved}, OTHER)


def test_a_graph_without_edges_has_no_indices_to_refuse() -> None:
    alone, used = Counts(10, 0, 2), step("cpu")
    found = used(fields_of(alone), alone)
    assert torch.equal(found["positions"], fields_of(alone)["positions"].tensor)
    assert int(used.buffers["edge_index"].min()) >= alone.atoms, "all edges are ghosts"


@pytest.mark.gpu
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(4))  # three before the capture, and the captured one
def test_a_capture_that_ends_in_the_middle_is_made_again(error: type[BaseException], call: int) -> None:
    used, calls = step("cuda"), []

    def ends_once(given: dict[str, Tensor], size: Counts) -> dict[str, Tensor]:
        calls.append(1)
        found = copied(given, size)
        if len(calls) == call + 1:
            raise error
        return found

    used.compute = ends_once
    with pytest.raises(error):
        used(fields_of(OTHER), OTHER)
    assert used._graph is None and not used._found
    for real in (GOOD, OTHER):
        found = used(fields_of(real), real)
        torch.testing.assert_close(found["positions"].cpu(), fields_of(real)["positions"].tensor)
    assert used.replays == 2


class Springs(torch.nn.Module):
    """Energies of atoms, from squares of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.stiffness = torch.nn.Parameter(torch.tensor(2.0))
        self.part = torch.nn.Identity()

    def forward(self, data: dict[str, Any]) -> dict[str, Any]:
        data = self.part(data)
        sender, receiver = data["edge_index"]
        squares = (data["positions"][receiver] - data["positions"][sender]).square().sum(1)
        energies = torch.zeros_like(data["positions"][:, 0]).index_add(0, receiver, self.stiffness * squares)
        return {"energies": energies, "edge_squares": squares}


class CapturableSprings(Package):
    title = "springs"
    classes = (f"{__name__}.Springs",)
    results: Mapping[str, str] = {"energies": "atoms"}
    left_out = frozenset(("edge_squares",))

    def runs_eagerly(self, model: Any, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        return ""

    def cutoff(self, model: Any) -> float:
        return 1.0

    def fields(self, model: Any, inputs: Mapping[str, Any], cutoff: float) -> tuple[Fields, Counts]:
        edges, positions = inputs["edge_index"], inputs["positions"]
        fields = {
            "positions": Field(positions, "atoms", 0.0, each=(3,)),
            "edge_index": Field(edges, "edges", ghost_ends, axis=1, below="atoms", each=(2,)),
        }
        return fields, Counts(positions.shape[0], edges.shape[1], 1)

    def compute(self, model: Any, given: dict[str, Tensor], size: Counts, options: Mapping[str, Any]) -> dict[str, Any]:
        return model(given, **options)

    def moving(self, model: Any, graph: AtomicGraph) -> dict[str, Tensor]:
        return {"positions": graph.positions, "edge_index": graph.edge_index}


CapturableSprings.__abstractmethods__ = frozenset()  # its models are captured, and not built or loaded


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Springs:
    monkeypatch.setattr(package, "packages", lambda: (CapturableSprings(),))
    return Springs().to(request.param)


def inputs(model: Springs, atoms: int = 10) -> dict[str, Tensor]:
    fields = fields_of(Counts(atoms, 3 * atoms, 1))
    return {name: fields[name].tensor.to(model.stiffness.device) for name in ("positions", "edge_index")}


def check(captured: CapturedModel, atoms: int = 10) -> None:
    given = inputs(captured.model, atoms)
    torch.testing.assert_close(captured(given)["energies"], captured.model(given)["energies"].detach())


def test_a_step_whose_first_call_failed_is_not_kept(model: Springs) -> None:
    captured = capture(model)
    check(captured)
    faulty = inputs(model, 100)
    with pytest.raises(InputError):
        captured({**faulty, "positions": faulty["positions"][:, :0]})
    with pytest.raises(InputError):
        captured({**faulty, "edge_index": faulty["edge_index"].cpu() + 99})
    assert len(captured.sizes) == captured.captures == captured.replays == 1
    check(captured, 100)
    assert len(captured.sizes) == captured.captures == captured.replays == 2


def test_after_a_model_was_refused_it_is_looked_at_again(model: Springs) -> None:
    captured = capture(model)
    check(captured)
    model.forward = lambda data: {}  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="this Springs has a forward of its own"):
            captured(inputs(model))
    del model.forward
    check(captured)


def test_own_methods_and_hooks_are_refused(model: Springs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that took the place of the package's, on its class."""
    captured = capture(model)

    def refused(match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            capture(model)
        with pytest.raises(UnsupportedError, match=match):
            captured(inputs(model))
        capture(Springs())

    for method in ("forward", "__call__"):
        model.__class__ = type("Own", (Springs,), {method: lambda self, data: {}})
        refused(f"Own has a {method} of its own")
        model.__class__ = type("Heir", (type("Own", (Springs,), {method: lambda self, data: {}}),), {})
        refused(f"Own has a {method} of its own")
    model.__class__ = type("Renamed", (Springs,), {})
    check(capture(model))
    model.__class__ = Springs
    for register in (model.register_forward_hook, model.register_forward_pre_hook):
        handle = register(lambda *_: None)
        refused("hooks of its own")
        handle.remove()
    hook = eval("lambda *_: None", {"__name__": "autotune.somewhere"})  # Equitune's own
    model.register_forward_hook(hook)
    check(captured)
    monkeypatch.setattr(Springs, "forward", eval("lambda self, data: {}", {"__name__": "elsewhere"}))
    with pytest.raises(UnsupportedError, match="Springs has a forward of its own"):
        capture(model)


def test_a_hook_or_a_forward_of_a_part_is_seen_by_the_next_call(model: Springs) -> None:
    """A replay does not run what is written in Python, so such a change needs another capture."""

    def twice(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "positions": 2 * data["positions"]}

    captured = capture(model)
    check(captured)
    handle = model.part.register_forward_hook(lambda _, given, out: twice(out))
    check(captured)
    handle.remove()
    check(captured)
    model.part.forward = twice  # type: ignore[method-assign]
    check(captured)
    assert captured.captures == 4


@pytest.mark.parametrize(
    "read", [lambda data: data.get("field"), lambda data: "field" in data, lambda data: data.copy()["field"]]
)
def test_an_input_that_a_part_reads_is_never_dropped(model: Springs, read: Any) -> None:
    captured, given = capture(model), inputs(model)
    handle = model.part.register_forward_pre_hook(lambda _, of: (read(of[0]), None)[1])
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="the model reads field"):
            captured({**given, "field": given["positions"]})
    handle.remove()
    check(captured)
    captured({**given, "unread": given["positions"]})


def test_a_result_of_unknown_rows_is_named(model: Springs, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, compute = capture(model), CapturableSprings.compute
    with monkeypatch.context() as patch:
        patch.setattr(CapturableSprings, "compute", lambda *of: compute(*of) | {"dipole": torch.zeros(3)})
        with pytest.raises(UnsupportedError, match="the model gives dipole"):
            captured(inputs(model))
    assert captured(inputs(model)).keys() == {"energies"}


def test_a_copy_of_a_model_after_a_failed_call_is_right(model: Springs) -> None:
    captured = capture(model)
    with pytest.raises(InputError):
        captured({**inputs(model), "edge_index": inputs(model)["edge_index"].cpu() + 99})
    check(copy.deepcopy(captured))
