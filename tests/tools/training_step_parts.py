"""What a training step of a model spends its device time on, by operator and by who asked for it.

    python tests/tools/training_step_parts.py --model mace-mp-0-medium --structure water-box --device cuda

The model, its inputs and the step are those of ``equitune bench models``, by contender (``equitune``, ``stock``, ...);
an optimizer's step (Adam) follows, and counts apart. On a GPU the profiler gives each kernel's time, and what it was
launched from. On a CPU there are no such times: launches are calls of torch's operators and of Equitune's kernels.

First table: by part. Second: Equitune's calls. Third: torch's operators, by sizes and the function that asked for
them; ``sum of two gradients`` are autograd's own, of what that function returned and another did before. Megabytes are
those of operands and results (torch's operators: of inputs, and of a result as large as the largest if it is no product
of matrices). Passes: ``value``, ``forces`` (the gradient that is differentiated again), ``loss`` (its backward pass).
"""

from __future__ import annotations

import argparse
import bisect
import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from autotune.bench.session import ModelSession, ModelSetting, synchronize, warm_up
from kernelgen.device import device_facts
from kernelgen.ops import node_kernels as gates
from kernelgen.ops import node_kernels as node_matrices
from kernelgen.ops import symmetric_contraction, tall_products
from kernelgen.runtime import call as runner

OURS, LOSS, OPTIMIZER = "equitune: ", "equitune: loss", "equitune: optimizer"
NODE = "autograd::engine::evaluate_function: "
SUMMED = "sum of two gradients"
# Passes over elements, by parts of the operators' names.
FILLS = ("zero", "fill", "ones", "Memset")
PARTS = (("additions", ("add", "sub")), ("fills", FILLS), ("copies", ("copy", "cat", "clone", "contiguous", "Memcpy")))
PRODUCTS, MATRICES = ("mm", "matmul", "dot", "linear"), "torch's matrix products"
# Operators that touch no elements.
VIEWS = (
    "view",
    "select",
    "narrow",
    "as_strided",
    "expand",
    "transpose",
    "slice",
    "split",
    "squeeze",
    "detach",
    "alias",
)
VIEWS += ("permute", "reshape", "unbind", "unflatten", "flatten", "empty", "aten::t", "aten::mT", "numpy_T", "resolve")
# Equitune's functions that launch kernels: owner, name, and what a call is called.
FUNCTIONS: tuple[tuple[Any, str, Callable[..., str]], ...] = (
    (runner.DirectCalls, "run_on", lambda self, graph, direction, *_: f"product {direction.text}"),
    (symmetric_contraction.ContractionOperator, "run", lambda self, direction, *_: f"contraction {direction.name}"),
    (tall_products, "product", lambda a, b: f"tall product {sizes([a, b])}"),
    (tall_products, "sums", lambda a, b: f"tall sums {sizes([a, b])}"),
    (gates.GateKernel, "_launch", lambda self, order, f, *_: f"gate of order {order} {sizes([f])}"),
    (node_matrices.BlockProduct, "rows", lambda self, wanted, *_: f"block matrices, d/d{wanted}"),
    (node_matrices.BlockProduct, "weights", lambda self, *_: "block matrices, d/dw"),
)


class Launch(NamedTuple):
    """Launches from one place. part: of the first table; maker: autograd's function, or ours."""

    part: str
    which: str
    what: str
    maker: str


def sizes(tensors: Any) -> str:
    return " ".join("x".join(map(str, tensor.shape)) for tensor in tensors)


@contextmanager
def named_calls(moved: dict[str, list[float]]) -> Iterator[None]:
    """Have the profiler see Equitune's calls by name. moved: megabytes of operands and results of each call."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in FUNCTIONS]

    def named(function: Any, words: Callable[..., str]) -> Any:
        @functools.wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            text = OURS + words(*given)
            with record_function(text):
                found = function(*given, **options)
            moved[text].append(megabytes((given, found)))
            return found

        return call

    for owner, name, words in FUNCTIONS:
        setattr(owner, name, named(vars(owner)[name], words))
    backward = torch.Tensor.backward

    def of_loss(self: torch.Tensor, *given: Any, **options: Any) -> None:
        with record_function(LOSS):
            backward(self, *given, **options)

    torch.Tensor.backward = of_loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
        for owner, name, function in before:
            setattr(owner, name, function)


def megabytes(given: Any) -> float:
    """Of all tensors in tuples, lists and dictionaries."""
    if isinstance(given, torch.Tensor):
        return given.nbytes / 1e6
    if isinstance(given, dict):
        given = tuple(given.values())
    return sum(map(megabytes, given)) if isinstance(given, tuple | list) else 0.0


class Places:
    """The profiled CPU's events as launches."""

    def __init__(self, events: Any, moved: dict[str, list[float]], element: int) -> None:
        self.moved, self.element, self.taken = moved, element, defaultdict(int)
        self.cpu = [event for event in events if event.device_type == DeviceType.CPU]
        self.losses = [(e.time_range.start, e.time_range.end) for e in self.cpu if e.name == LOSS]
        self.forces = sorted(
            (e.time_range.start, e.time_range.end) for e in self.cpu if e.name.startswith(NODE) and not self._in_loss(e)
        )

    def _in_loss(self, event: Any) -> bool:
        return any(begin <= event.time_range.start <= end for begin, end in self.losses)

    def which(self, event: Any, chain: list[str]) -> str:
        """The pass of an event; the engine's threads are told from the caller's by time."""
        if OPTIMIZER in chain:
            return "optimizer"
        if self._in_loss(event):
            return "loss"
        place = bisect.bisect(self.forces, (event.time_range.start, math.inf)) - 1
        return "forces" if place >= 0 and event.time_range.start <= self.forces[place][1] else "value"

    def launch(self, event: Any, kernel: str = "") -> Launch:
        """kernel: the name of one that was launched in the event."""
        around = [event, *above(event)]
        chain = [one.name for one in around]
        if OPTIMIZER in chain:
            return Launch("optimizer", "optimizer", "", "")
        ours = next((name for name in chain if name.startswith(OURS) and name not in (LOSS, OPTIMIZER)), "")
        ours, node = ours.removeprefix(OURS), next((n.removeprefix(NODE) for n in chain if n.startswith(NODE)), "")
        which, op = self.which(event, chain), next((one for one in reversed(around) if one.name[:6] == "aten::"), None)
        if kernel.startswith("Memset"):
            return Launch("fills", which, kernel, ours or node or "the model")
        if ours and op is None:
            return Launch(ours.split(" ")[0], which, ours, node)
        inside = next((one for one in chain if one == node or one.startswith("_")), "")
        if op is None:
            return Launch("other kernels" if kernel else part_of(event.name), which, kernel or event.name, inside)
        # The engine adds gradients up; what else it does between nodes are sums over what was broadcast.
        summed = bool(node) and node not in chain and not ours and op.name.startswith("aten::add")
        maker = f"{SUMMED}: {node}" if summed else ours or inside or node or "the model"
        shapes = " ".join("x".join(map(str, shape)) for shape in op.input_shapes or () if shape)
        return Launch(part_of(op.name, summed), which, f"{op.name} {shapes}", maker)

    def megabytes(self, event: Any) -> float:
        """Of one call, known for Equitune's, estimated for torch's."""
        if event.name.startswith(OURS):
            place = self.taken[event.name]
            self.taken[event.name] += 1
            return self.moved[event.name][place] if place < len(self.moved[event.name]) else 0.0
        shapes = [shape for shape in event.input_shapes or () if shape]
        counts = [math.prod(shape) for shape in shapes]
        result = max(counts, default=0)
        if part_of(event.name) == MATRICES and len(shapes) > 1:
            result = math.prod(shapes[-2][:-1]) * shapes[-1][-1]
        return (sum(counts) + result) * self.element / 1e6


def above(event: Any) -> Iterator[Any]:
    """The events around one, innermost first."""
    while (event := event.cpu_parent) is not None:
        yield event


def is_operator(name: str) -> bool:
    """Whether it is a call of Equitune's, or of an operator of torch's that touches elements."""
    if name.startswith("aten::"):
        return name not in VIEWS and not any(view in name for view in VIEWS if ":" not in view)
    return name.startswith(OURS) and name not in (LOSS, OPTIMIZER)


def part_of(name: str, summed: bool = False) -> str:
    if summed:
        return "additions of autograd"
    if any(word in name for word in PRODUCTS):
        return MATRICES
    return next((part for part, words in PARTS if any(word in name for word in words)), "torch's other operators")


def measured(step: Callable[[], object], device: str, element: int) -> dict[Launch, list[float]]:
    """By place: launches, microseconds of the device, megabytes."""
    moved: dict[str, list[float]] = defaultdict(list)
    on_gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with named_calls(moved), torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        synchronize(device)
    events = profiler.events()
    places, found = Places(events, moved, element), defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in places.cpu:
        if is_operator(event.name) and not any(is_operator(one.name) for one in above(event)):
            row = found[places.launch(event)]
            row[0] += not on_gpu
            row[2] += places.megabytes(event)
    for parent, kernel, time_us in launches_of(events):
        unknown = Launch("of unknown place", "", kernel[:60], "")
        row = found[unknown if parent is None else places.launch(parent, kernel[:60])]
        row[0] += 1
        row[1] += time_us
    return {place: row for place, row in found.items() if row[0] or row[1]}


def launches_of(events: Any) -> Iterator[tuple[Any, str, float]]:
    """What a GPU ran: the innermost event around the launch, which names of ours are too, the name, and microseconds.

    A kernel has the number of the driver's call that launched it. Where that is not there, torch's operator counts.
    """
    calls = {e.id: e for e in events if e.device_type == DeviceType.CPU and e.name.startswith("cu")}
    operators: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for event in events:
        for kernel in event.kernels if event.device_type == DeviceType.CPU else ():
            operators[kernel.name, round(kernel.duration)].append(event)
    for event in events:
        # The names above have events on the device too, which are no kernels.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", event.name[:10] == OURS):
            time_us = event.time_range.elapsed_us()
            call, known = calls.get(event.id), operators[event.name, round(time_us)]
            operator = known.pop() if known else None
            yield (call and call.cpu_parent) or operator, event.name, time_us


def table(rows: dict[str, list[float]], count: int) -> list[str]:
    """The largest rows, in time where it is known, else in bytes."""
    ordered = sorted(rows.items(), key=lambda row: (-row[1][1], -row[1][2], -row[1][0]))
    lines = [f"{'launches':>8} {'us':>9} {'MB':>9}"]
    return lines + [f"{n:8.0f} {us:9.1f} {mb:9.1f}  {text}" for text, (n, us, mb) in ordered[:count]]


def totals(found: dict[Launch, list[float]], words: Callable[[Launch], str]) -> dict[str, list[float]]:
    """Sums of the rows that have the same words; those without any are left out."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for place, row in found.items():
        if text := words(place):
            rows[text] = [a + b for a, b in zip(rows[text], row, strict=True)]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mace-mp-0-medium", help="a name of equitune bench models, or a file")
    parser.add_argument("--structure", default="water-box")
    parser.add_argument("--contender", default="equitune")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--rows", type=int, default=24, help="of the second table")
    parser.add_argument("--out", type=Path, help="a file for all rows, JSON")
    given = parser.parse_args()
    session = ModelSession(ModelSetting(given.model, given.contender, given.device, given.dtype))
    if session.error:
        raise SystemExit(session.error)
    train = session.step(given.structure, "training")
    optimizer = torch.optim.Adam(session.model.module.parameters())

    def step() -> None:
        train()
        with record_function(OPTIMIZER):
            optimizer.step()

    # The optimizer's steps change the weights, whose values cost nothing.
    warm_up(step, given.device, 3 if given.device.startswith("cuda") else 1, 120.0)
    found = measured(step, given.device, 4 if given.dtype == "float32" else 8)
    print(f"{given.model} ({given.contender}), training on {given.structure}, {device_facts(given.device).name}")
    parts = totals(found, lambda place: place.part)
    step_rows = [row for part, row in parts.items() if part != "optimizer"]
    parts["all but the optimizer"] = [sum(column) for column in zip(*step_rows, strict=True)]
    print("\n".join(table(parts, 99)))
    ours = {"product", "contraction", "tall", "gate", "block"}
    print("\nEquitune's calls")
    print("\n".join(table(totals(found, lambda p: f"{p.which:6} {p.what}" if p.part in ours else ""), given.rows)))
    print("\nTorch's operators")
    others = totals(found, lambda p: "" if p.part in {*ours, "optimizer"} else f"{p.which:6} {p.what} | {p.maker}")
    print("\n".join(table(others, given.rows)))
    if given.out:
        rows = [[*place, *row] for place, row in found.items()]
        given.out.write_text(json.dumps({"columns": [*Launch._fields, "launches", "us", "MB"], "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
