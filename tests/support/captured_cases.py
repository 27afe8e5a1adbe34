"""What the tests of captured models share: structures, and the questions that are put to every package's models."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
from ase.md.verlet import VelocityVerlet
from model_cases import Results, imidazole

from autotune import CapturedModel, accelerate, capture, restore
from kernelgen.errors import InputError, UnsupportedError

# Parameters of a test that runs on the GPU too, where there is one.
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Of a model and structures, what it predicts.
Predict = Callable[..., Results]
# Of a model and structures, its inputs on its device; of a model and its inputs, what it predicts.
BatchOf = Callable[..., dict[str, Any]]
Call = Callable[[Any, dict[str, Any]], Results]
# The padded sums are the same, of the same numbers; a matrix product may add in another order.
TOLERANCE = 1e-12


def in_a_box() -> Atoms:
    """72 atoms whose images are neighbours, displaced."""
    atoms = imidazole()
    atoms.set_cell([5.0, 5.5, 6.0])
    atoms = atoms.repeat(2)
    atoms.rattle(0.05, seed=1)
    return atoms


def slanted() -> Atoms:
    """A cell without right angles, periodic in two directions."""
    atoms = imidazole()
    atoms.set_cell([[6.0, 0.0, 0.0], [2.0, 5.5, 0.0], [0.5, 1.0, 9.0]])
    atoms.set_pbc([True, True, False])
    return atoms


def steps_of_size() -> list[list[Atoms]]:
    """Batches that grow and shrink, in periodic cells, one with all elements and one with an atom without edges."""
    atoms = imidazole()
    lonely = atoms.copy()
    lonely.positions[0] += [4.5, 0.0, 4.5]
    return [[atoms], [in_a_box()], [atoms[:5]], [slanted()], [lonely], [atoms, slanted(), atoms[:4]], [atoms]]


def assert_close(found: Results, wanted: Results, tolerance: float = TOLERANCE) -> None:
    assert set(wanted) <= set(found)
    for name, value in wanted.items():
        assert found[name].shape == value.shape, name
        assert torch.isfinite(found[name]).all(), name
        error = float((found[name] - value).abs().max()) / max(float(value.abs().max()), 1e-30)
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def check_padded_equals_unpadded(model: torch.nn.Module, predict: Predict, batches: list[list[Atoms]]) -> None:
    captured = capture(model)
    for batch in batches:
        assert_close(predict(captured, *batch), predict(model, *batch))
    assert captured.replays == len(batches) and captured.eager_calls == 0
    assert 1 < captured.captures <= len(batches)


def check_no_graph_is_stale(model: torch.nn.Module, predict: Predict) -> None:
    """Structures of as many atoms, with other edges, elements, cells and positions, served by the same capture."""
    first = imidazole()
    captured = capture(model, growth=4.0)
    moved, swapped, squeezed = first.copy(), first.copy(), first.copy()
    moved.positions[:2] = moved.positions[:2][::-1]
    moved.positions[8] += 0.3
    swapped.numbers = swapped.numbers[::-1].copy()
    squeezed.set_cell([7.0, 7.5, 12.0])
    answers = [predict(captured, atoms) for atoms in (first, moved, swapped, squeezed, first)]
    for atoms, found in zip((first, moved, swapped, squeezed, first), answers, strict=True):
        assert_close(found, predict(model, atoms))
    assert captured.captures == 1, "else nothing was shown"
    assert not torch.equal(answers[0]["energy"], answers[1]["energy"])
    assert torch.equal(answers[0]["forces"], answers[4]["forces"])


def check_few_sizes_are_kept(model: torch.nn.Module, predict: Predict) -> None:
    captured, atoms = capture(model, kept=2), imidazole()
    predict(captured, atoms)
    first = weakref.ref(next(iter(captured._steps.values())).buffers["edge_index"])
    for repeats in (2, 4, 8):
        predict(captured, atoms.repeat((repeats, 1, 1)))
        assert len(captured.sizes) <= 2
    assert captured.captures == 4
    gc.collect()
    assert first() is None, "the memory of a size that went is still there"
    used = captured.sizes[0]
    predict(captured, atoms.repeat((4, 1, 1)))
    assert captured.sizes[-1] == used and captured.captures == 4, "the size used last goes last"
    last = weakref.ref(next(iter(captured._steps.values())).buffers["edge_index"])
    captured.forget()
    gc.collect()
    assert not captured.sizes and last() is None
    predict(captured, atoms)
    assert captured.captures == 5


def check_outgrown_graphs_can_be_eager(model: torch.nn.Module, predict: Predict) -> None:
    captured, atoms = capture(model, outgrown="eager"), imidazole()
    predict(captured, atoms)
    large = atoms.repeat((6, 1, 1))
    assert_close(predict(captured, large), predict(model, large))
    assert (captured.captures, captured.eager_calls, captured.replays) == (1, 1, 1)


def check_changes_of_the_model_are_seen(model: torch.nn.Module, predict: Predict) -> None:
    """Values written in place by the same capture; other memory and modules by a new one."""
    captured, atoms = capture(model), imidazole()
    before = predict(captured, atoms)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    after = predict(captured, atoms)
    assert_close(after, predict(model, atoms))
    assert captured.captures == 1
    assert not torch.equal(after["energy"], before["energy"])

    def replace() -> None:
        parent = next(module for module in model.modules() if module._parameters.get("weight") is not None)
        parent.weight = torch.nn.Parameter(parent.weight.detach() * 1.1)

    changes = (replace, lambda: restore(model), lambda: accelerate(model))
    for number, change in enumerate(changes, 2):
        change()
        assert_close(predict(captured, atoms), predict(model, atoms))
        assert captured.captures == number and len(captured.sizes) == 1


# Inputs by which atoms, edges and structures are counted: if one is too short, the others are said to be too long.
COUNTED = ("positions", "pos", "atomic_numbers", "edge_index", "ptr", "num_atoms", "cell_volume")


def check_failed_calls_leave_nothing(
    model: torch.nn.Module, batch_of: BatchOf, call: Call, may_be_short: str = ""
) -> None:
    """After a call that raised or was interrupted at any field, the next one of the size before is right.

    A field of too few rows, or of one that a copy would broadcast, is an error that names it.
    """
    atoms = imidazole()
    larger = atoms.copy() + Atoms("H", [[3.0, 3.0, 3.0]])
    larger.rattle(0.1, seed=2)
    good, other = batch_of(model, atoms), batch_of(model, larger, larger[:4])
    both = batch_of(model, atoms, atoms[:4])
    captured = capture(model, growth=4.0)
    for right, faulty in ((good, batch_of(model, larger)), (both, other)):
        wanted = call(model, right)
        assert_close(call(captured, right), wanted)
        names = list(next(reversed(captured._steps.values())).buffers)
        for name in set(names) & faulty.keys() - {may_be_short}:
            rows = 1 if name == "edge_index" else 0
            most = faulty[name].shape[rows]
            for kept in {1, most - 1} - {0, most}:
                with pytest.raises(RuntimeError, match="" if name in COUNTED else name):
                    call(captured, {**faulty, name: faulty[name].narrow(rows, 0, kept)})
                assert_close(call(captured, right), wanted)
        for name in names:
            with _interrupted_at(captured, name), pytest.raises(KeyboardInterrupt):
                call(captured, faulty)
            assert_close(call(captured, right), wanted)
    assert captured.captures == 2, "else another capture served"
    assert captured.eager_calls == 0


@contextlib.contextmanager
def _interrupted_at(captured: Any, name: str) -> Iterator[None]:
    """Within, a captured step is interrupted at the ghosts of a field, after it wrote the field's real rows."""

    def interrupt(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    package = captured.package

    class Interrupting(type(package)):  # type: ignore[misc]
        def fields(self, *of: Any) -> Any:
            fields, real = package.fields(*of)
            return {**fields, name: fields[name]._replace(ghost=interrupt)}, real

    captured.package = Interrupting()
    try:
        yield
    finally:
        captured.package = package


def check_wrong_inputs_are_as_the_models(model: torch.nn.Module, batch_of: BatchOf, call: Call) -> None:
    """Inputs that are too many, missing, of another dtype, out of range: as the model itself, or an error; the next
    call is right.
    """
    good = batch_of(model, imidazole())
    captured, wanted = capture(model), call(model, good)
    assert_close(call(captured, {**good, "unheard_of": torch.zeros(3)}), wanted)
    single = {name: value.float() if _is_float(value) else value for name, value in good.items()}
    wrong = [single] + [{other: value for other, value in good.items() if other != name} for name in good]
    if not good["edge_index"].is_cuda:  # else the model's own assertion on the device would end the process
        wrong += [{**good, name: good[name] + 1} for name in ("edge_index", "batch") if name in good]
    errors = (RuntimeError, IndexError, KeyError, AttributeError, InputError)
    for given in wrong:
        try:
            stock = call(model, given)
        except errors:
            with contextlib.suppress(*errors):  # it reads less than the model
                assert_close(call(captured, given), wanted)
        else:
            with contextlib.suppress(InputError):
                found = call(captured, given)
                assert_close(found, {name: value for name, value in stock.items() if value.numel()}, 1e-4)
        assert_close(call(captured, good), wanted)


def _is_float(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


def check_own_methods_are_refused(model: Any, batch_of: BatchOf, call: Call) -> None:
    """A forward of a subclass or of the model itself, or a hook: before the capture and after it."""
    kind, good = type(model), batch_of(model, imidazole())
    captured = capture(model)
    call(captured, good)

    def refused(match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            capture(model)
        with pytest.raises(UnsupportedError, match=match):
            call(captured, good)

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return kind.forward(self, *given, **options)

    model.__class__ = type("Own", (kind,), {"forward": functools.wraps(kind.forward)(forward)})
    refused("Own has a forward of its own")
    model.__class__ = type("Called", (kind,), {"__call__": forward})
    refused("Called has a __call__ of its own")
    model.__class__ = type("Renamed", (kind,), {})
    call(capture(model), good)
    model.__class__ = kind
    model.forward = functools.partial(kind.forward, model)
    refused("has a forward of its own")
    del model.forward
    for register in (model.register_forward_hook, model.register_forward_pre_hook):
        handle = register(lambda *_: None)
        refused("has hooks of its own")
        handle.remove()
    assert_close(call(captured, good), call(model, good))


def check_lost_inputs_and_results_are_refused(model: Any, part: Any, batch_of: BatchOf, call: Call) -> None:
    """``part``: a module of the model that takes and gives a dictionary. Here it reads one more input, or adds one."""
    good = batch_of(model, imidazole())
    with_field = {**good, "field": good["edge_index"].new_ones(3)}
    for read in (lambda data: data.get("field"), lambda data: "field" in data):
        handle = part.register_forward_pre_hook(lambda _, given, read=read: (read(given[0]), None)[1])
        captured = capture(model)
        assert_close(call(captured, good), call(model, good))
        with pytest.raises(UnsupportedError, match="the model reads field"):
            call(captured, with_field)
        assert_close(call(captured, good), call(model, good))
        handle.remove()
    handle = part.register_forward_pre_hook(lambda _, given: given[0]["field"] and None)
    with pytest.raises(UnsupportedError, match="the model reads field"):
        call(capture(model), with_field)
    handle.remove()
    part.register_forward_hook(lambda _, given, out: {**out, "dipole": out["edge_index"]})
    with pytest.raises(UnsupportedError, match="the model gives dipole"):
        call(capture(model), good)


def check_dynamics(captured: Any, eager: Any, models: list[CapturedModel], steps: int, tolerance: float) -> None:
    """The same trajectory by two calculators; edges come and go. ``models``: the captured ones."""
    frames = []
    for calculator in (captured, eager):
        atoms = imidazole()
        atoms.calc = calculator
        MaxwellBoltzmannDistribution(atoms, temperature_K=2000, rng=np.random.default_rng(0))
        dynamics, found = VelocityVerlet(atoms, 1.0 * units.fs), []
        for _ in range(steps):
            dynamics.run(1)
            found.append((atoms.positions.copy(), np.array([atoms.get_potential_energy()]), atoms.get_stress()))
        frames.append(found)
    for one, other in zip(*frames, strict=True):
        for a, b in zip(one, other, strict=True):
            assert np.isfinite(a).all()
            assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-6)
    for model in models:
        assert model.replays == steps + 1 and model.eager_calls == 0
        assert model.captures <= 3, "steps of size serve many steps of dynamics"


def check_on_the_gpu(model: torch.nn.Module, predict: Predict, tolerance: float) -> None:
    """Replays equal eager steps, are counted, and see parameters that are written in place."""
    model = model.cuda()
    captured = capture(model)
    for _ in range(2):
        for batch in steps_of_size()[:3]:
            assert_close(predict(captured, *batch), predict(model, *batch), tolerance)
    steps = list(captured._steps.values())
    assert all(step._graph is not None for step in steps)
    assert sum(step.replays for step in steps) == captured.replays == 6
    assert captured.captures == len(steps) <= 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    captures = captured.captures
    assert_close(predict(captured, imidazole()), predict(model, imidazole()), tolerance)
    assert captured.captures == captures
