"""Models of every package whose steps are captured: on the CPU the same padded steps, on a GPU one launch each."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ase import Atoms
from captured_cases import (
    PACKAGES,
    Package,
    assert_close,
    check_dynamics,
    check_padded_equals_unpadded,
    on_devices,
    steps_of_size,
)
from model_cases import imidazole, needs, small_model

from autotune.models.accelerate import accelerate, restore
from autotune.models.capture import capture
from autotune.models.package import default_dtype
from kernelgen.errors import InputError, UnsupportedError


def packages(*names: str) -> Any:
    """Parameters of a test: all packages, or these."""
    chosen = [pytest.param(PACKAGES[name], id=name, marks=needs(name)) for name in names or PACKAGES]
    return pytest.mark.parametrize("package", chosen)


of_all = packages()


@of_all
def test_padded_steps_are_equal_to_unpadded_ones(package: Package) -> None:
    check_padded_equals_unpadded(package, package.model(), steps_of_size())


@of_all
def test_a_stock_model_is_captured_too(package: Package) -> None:
    model = small_model(package.name).eval()
    captured, atoms = capture(model), imidazole()
    assert_close(package.predict(captured, atoms), package.predict(model, atoms))
    assert captured.replays == 1


@of_all
def test_the_example_is_captured_at_once_and_the_inputs_stay_as_they_are(package: Package) -> None:
    model = package.model()
    batch = package.inputs(model, imidazole())
    before = copy.deepcopy(batch)
    with default_dtype(torch.float64):
        captured = capture(model, batch, **package.options)
        assert captured.captures == 1
        captured(batch, **package.options)
    assert captured.captures == 1
    assert batch.keys() == before.keys()
    for name, value in before.items():
        assert not torch.is_tensor(value) or torch.equal(batch[name], value) and not batch[name].requires_grad


@of_all
def test_changed_graphs_are_never_served_stale(package: Package) -> None:
    """Structures of as many atoms, with other edges, elements, cells and positions, served by the same capture."""
    model, first = package.model(), imidazole()
    captured = capture(model, growth=4.0)
    moved, swapped, squeezed = first.copy(), first.copy(), first.copy()
    moved.positions[:2] = moved.positions[:2][::-1]
    moved.positions[8] += 0.3
    swapped.numbers = swapped.numbers[::-1].copy()
    squeezed.set_cell([7.0, 7.5, 12.0])
    answers = [package.predict(captured, atoms) for atoms in (first, moved, swapped, squeezed, first)]
    for atoms, found in zip((first, moved, swapped, squeezed, first), answers, strict=True):
        assert_close(found, package.predict(model, atoms))
    assert captured.captures == 1, "else nothing was shown"
    assert not torch.equal(answers[0]["energy"], answers[1]["energy"])
    assert torch.equal(answers[0]["forces"], answers[4]["forces"])


@of_all
def test_few_sizes_are_kept(package: Package) -> None:
    model = package.model()
    captured, atoms = capture(model, kept=2), imidazole()
    package.predict(captured, atoms)
    first = weakref.ref(next(iter(captured._steps.values())).buffers["edge_index"])
    for repeats in (2, 4, 8):
        package.predict(captured, atoms.repeat((repeats, 1, 1)))
        assert len(captured.sizes) <= 2
    assert captured.captures == 4
    gc.collect()
    assert first() is None, "the memory of a size that went is still there"
    used = captured.sizes[0]
    package.predict(captured, atoms.repeat((4, 1, 1)))
    assert captured.sizes[-1] == used and captured.captures == 4, "the size used last goes last"
    last = weakref.ref(next(iter(captured._steps.values())).buffers["edge_index"])
    captured.forget()
    gc.collect()
    assert not captured.sizes and last() is None
    package.predict(captured, atoms)
    assert captured.captures == 5


@of_all
def test_outgrown_graphs_can_be_left_to_the_model(package: Package) -> None:
    model = package.model()
    captured, atoms = capture(model, outgrown="eager"), imidazole()
    package.predict(captured, atoms)
    large = atoms.repeat((6, 1, 1))
    assert_close(package.predict(captured, large), package.predict(model, large))
    assert (captured.captures, captured.eager_calls, captured.replays) == (1, 1, 1)


@of_all
def test_changes_of_the_model_are_seen(package: Package) -> None:
    """Values written in place by the same capture; other memory and modules by a new one."""
    model = package.model()
    captured, atoms = capture(model), imidazole()
    before = package.predict(captured, atoms)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    after = package.predict(captured, atoms)
    assert_close(after, package.predict(model, atoms))
    assert captured.captures == 1
    assert not torch.equal(after["energy"], before["energy"])

    def replace() -> None:
        parent = next(module for module in model.modules() if module._parameters.get("weight") is not None)
        parent.weight = torch.nn.Parameter(parent.weight.detach() * 1.1)

    changes = (replace, lambda: restore(model), lambda: accelerate(model))
    for number, change in enumerate(changes, 2):
        change()
        assert_close(package.predict(captured, atoms), package.predict(model, atoms))
        assert captured.captures == number and len(captured.sizes) == 1


# Inputs by which atoms, edges and structures are counted: if one is too short, the others are said to be too long.
COUNTED = ("positions", "pos", "atomic_numbers", "edge_index", "ptr", "num_atoms", "cell_volume")


@on_devices
@of_all
def test_failed_and_interrupted_calls_leave_nothing(package: Package, device: str) -> None:
    """After a call that raised or was interrupted at any field, the next one of the size before is right.

    A field of too few rows, or of one that a copy would broadcast, is an error that names it.
    """
    model, atoms = package.model().to(device), imidazole()
    larger = atoms.copy() + Atoms("H", [[3.0, 3.0, 3.0]])
    larger.rattle(0.1, seed=2)
    good, other = package.inputs(model, atoms), package.inputs(model, larger, larger[:4])
    both = package.inputs(model, atoms, atoms[:4])
    captured = capture(model, growth=4.0)
    for right, faulty in ((good, package.inputs(model, larger)), (both, other)):
        wanted = package.call(model, right)
        assert_close(package.call(captured, right), wanted)
        names = list(next(reversed(captured._steps.values())).buffers)
        for name in set(names) & faulty.keys() - {package.optional}:
            rows = 1 if name == "edge_index" else 0
            most = faulty[name].shape[rows]
            for kept in {1, most - 1} - {0, most}:
                with pytest.raises(RuntimeError, match="" if name in COUNTED else name):
                    package.call(captured, {**faulty, name: faulty[name].narrow(rows, 0, kept)})
                assert_close(package.call(captured, right), wanted)
        for name in names:
            with _interrupted_at(captured, name), pytest.raises(KeyboardInterrupt):
                package.call(captured, faulty)
            assert_close(package.call(captured, right), wanted)
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


@on_devices
@of_all
def test_wrong_inputs_are_as_the_models(package: Package, device: str) -> None:
    """Inputs that are too many, missing, of another dtype, out of range: as the model itself, or an error; the next
    call is right.
    """
    model = package.model().to(device)
    good = package.inputs(model, imidazole())
    captured, wanted = capture(model), package.call(model, good)
    assert_close(package.call(captured, {**good, "unheard_of": torch.zeros(3)}), wanted)
    single = {name: value.float() if _is_float(value) else value for name, value in good.items()}
    wrong = [single] + [{other: value for other, value in good.items() if other != name} for name in good]
    if not good["edge_index"].is_cuda:  # else the model's own assertion on the device would end the process
        wrong += [{**good, name: good[name] + 1} for name in ("edge_index", "batch") if name in good]
    errors = (RuntimeError, IndexError, KeyError, AttributeError, InputError)
    for given in wrong:
        try:
            stock = package.call(model, given)
        except errors:
            with contextlib.suppress(*errors):  # it reads less than the model
                assert_close(package.call(captured, given), wanted)
        else:
            with contextlib.suppress(InputError):
                found = package.call(captured, given)
                assert_close(found, {name: value for name, value in stock.items() if value.numel()}, 1e-4)
        assert_close(package.call(captured, good), wanted)


def _is_float(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_floating_point()


@on_devices
@of_all
def test_models_with_a_forward_of_their_own_are_refused(package: Package, device: str) -> None:
    """A forward of a subclass or of the model itself, or a hook: before the capture and after it."""
    model = package.model().to(device)
    kind, good = type(model), package.inputs(model, imidazole())
    captured = capture(model)
    package.call(captured, good)

    def refused(match: str) -> None:
        with pytest.raises(UnsupportedError, match=match):
            capture(model)
        with pytest.raises(UnsupportedError, match=match):
            package.call(captured, good)

    def forward(self: Any, *given: Any, **options: Any) -> Any:
        return kind.forward(self, *given, **options)

    model.__class__ = type("Own", (kind,), {"forward": functools.wraps(kind.forward)(forward)})
    refused("Own has a forward of its own")
    model.__class__ = type("Called", (kind,), {"__call__": forward})
    refused("Called has a __call__ of its own")
    model.__class__ = type("Renamed", (kind,), {})
    package.call(capture(model), good)
    model.__class__ = kind
    model.forward = functools.partial(kind.forward, model)
    refused("has a forward of its own")
    del model.forward
    for register in (model.register_forward_hook, model.register_forward_pre_hook):
        handle = register(lambda *_: None)
        refused("has hooks of its own")
        handle.remove()
    assert_close(package.call(captured, good), package.call(model, good))
    stock = small_model(package.name).to(device)
    stock.__class__ = type("Own", (type(stock),), {"forward": lambda self, data: {}})
    with pytest.raises(UnsupportedError, match="Own has a forward of its own"):
        capture(stock)


@on_devices
@packages("nequip", "allegro", "sevennet")
def test_results_that_a_step_would_lose(package: Package, device: str) -> None:
    model = package.model().to(device)
    package.dictionaries(model).register_forward_hook(lambda _, given, out: {**out, "dipole": out["edge_index"]})
    with pytest.raises(UnsupportedError, match="the model gives dipole"):
        package.call(capture(model), package.inputs(model, imidazole()))


@packages("nequip", "allegro", "sevennet")
def test_training_is_left_to_the_model(package: Package) -> None:
    captured = capture(package.model().train())
    assert package.predict(captured, imidazole())["forces"].shape == (9, 3)
    assert (captured.eager_calls, captured.captures) == (1, 0)


@of_all
def test_inference_mode_leaves_nothing_behind(package: Package) -> None:
    model = package.model()
    captured, atoms = capture(model), imidazole()
    with torch.inference_mode():
        found = package.predict(captured, atoms)
    assert_close(found, package.predict(model, atoms))
    assert_close(package.predict(captured, atoms[:8]), package.predict(model, atoms[:8]))


@of_all
def test_copies_capture_for_themselves(package: Package) -> None:
    captured, atoms = capture(package.model()), imidazole()
    wanted = package.predict(captured, atoms)
    for other in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert other.sizes == ()
        assert_close(package.predict(other, atoms), wanted)
        assert other.sizes == captured.sizes


@of_all
def test_the_calculators_dynamics_are_stocks(package: Package) -> None:
    with default_dtype(package.dtype):
        tolerance = 1e-8 if package.dtype is torch.float64 else 1e-3
        check_dynamics(package.calculators(), package.steps, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@packages("mace", "nequip", "sevennet")
def test_replays_on_the_gpu(package: Package, dtype: torch.dtype) -> None:
    """Replays equal eager steps, are counted, and see parameters that are written in place."""
    model = package.model(dtype).cuda()
    captured, tolerance = capture(model), 1e-12 if dtype is torch.float64 else 1e-5
    for _ in range(2):
        for batch in steps_of_size()[:3]:
            assert_close(package.predict(captured, *batch), package.predict(model, *batch), tolerance)
    steps = list(captured._steps.values())
    assert all(step._graph is not None for step in steps)
    assert sum(step.replays for step in steps) == captured.replays == 6
    assert captured.captures == len(steps) <= 3
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)
    captures = captured.captures
    assert_close(package.predict(captured, imidazole()), package.predict(model, imidazole()), tolerance)
    assert captured.captures == captures
