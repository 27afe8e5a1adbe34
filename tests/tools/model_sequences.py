"""Sequences of what users do to a model, on stock, accelerated and captured copies of it: all must go on alike.

    python tests/tools/model_sequences.py --package mace --sequences 1000 --seed 1
    python tests/tools/model_sequences.py --package mace --replay '[("call", 3), ("write_data", 7), ("call", 3)]'

A sequence is a list of (action, number); the number draws the action's details, the same for every copy. The table of
actions is ``ACTIONS`` in ``sequence_actions``. After each action a copy has stock's results to ``TOLERANCE``, or it
raised an error of Equitune's that says what to do, or stock raised too. The command prints failures, shortened, and how
often each action ran.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Before torch: results do not depend on how threads share a sum, and a process with threads cannot be forked.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("EQUITUNE_MISSES", "0")
    sys.path[:0] = [str(Path(__file__).resolve().parents[up] / below) for up, below in ((2, ""), (1, "support"))]

import torch
from sequence_actions import ACTIONS, AFTER_FLOAT32, Action, detached
from sequence_models import KINDS, PACKAGES, Results, Subject, subject_of

from autotune.models.package import default_dtype
from kernelgen.errors import EquituneError

IN_FLOAT32 = 1e-3

# What undoes an action, or needs it, and would seldom come after it by chance.
LATER = {
    "average": "average_in",
    "average_in": "average_out",
    "parametrize": "remove_parametrization",
    "prune": "remove_pruning",
    "weight_norm": "remove_weight_norm",
    "hook": "remove_hooks",
    "restore": "accelerate",
}

Sequence = list[tuple[str, int]]


@dataclass(frozen=True)
class Failure:
    """Why a copy does not go on as stock: at which step of the sequence, in which action, and in words."""

    kind: str
    step: int
    action: str
    what: str
    trace: str = ""

    @property
    def signature(self) -> tuple[str, str, str]:
        """The same for failures that are probably one fault: raised in one function, or a result that differs."""
        if self.trace:
            place = self.trace.rpartition("  File ")[2].partition("\n")[0].rpartition("/")[2]
            return self.kind, self.action, f"{self.what.partition(':')[0]} in {place}"
        kept = "".join("#" if letter.isdigit() else letter for letter in self.what.partition(" by ")[0])
        return self.kind, self.action, kept[:100]


@dataclass
class Run:
    """What a sequence did. outcomes: stock's. ends: text of the typed error in which a copy's sequence ended."""

    sequence: Sequence
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)


Outcome = tuple[Results | None, BaseException | None]


def _attempt(subject: Subject, action: Callable[..., Any], number: int) -> Outcome:
    torch.manual_seed(number)
    try:
        return action(subject, random.Random(number)), None
    except Exception as error:
        return None, error


def _finals(subject: Subject, draw: random.Random) -> Results:
    """A call of every structure's size, and of the models that were copied."""
    found: Results = {}
    for place in (0, 4, 7):
        found |= {f"{name} of {place}": value for name, value in subject.call(subject.batches[place]).items()}
    for number, model in enumerate(subject.originals):
        given = subject.call(subject.batches[0], model)
        found |= {f"{name} of original {number}": value for name, value in given.items()}
    return detached(found)


def run(package: str, sequence: Sequence, device: str = "cpu", is_last: bool = False) -> Run:
    """Apply a sequence to all copies of a package's model. is_last: see :func:`subject_of`."""
    done, steps = Run(sequence), [*sequence, ("final", 0)]
    # TorchScript would optimise e3nn's code anew in the first calls of each copy.
    with default_dtype(torch.float64), torch.jit.optimized_execution(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, wanted = subject_of(package, "stock", device, is_last), []
        for name, number in steps:
            action = Action(_finals, copies=True) if name == "final" else ACTIONS[name]
            found, error = _attempt(stock, action.do, number)
            done.outcomes.append((name, "stock raised" if error is not None else "nothing" if found == {} else "ran"))
            if error is not None and not action.copies:
                break  # what it did before it raised is unknown
            wanted.append((name, number, action, found, error, stock.tolerance, _names(stock)))
        for kind in KINDS[1:]:
            _compare(subject_of(package, kind, device, is_last), wanted, done)
    return done


def run_apart(package: str, sequence: Sequence, device: str = "cpu") -> Run:
    """The same in a process of its own, if the device allows it: a crash is a failure, and models need no copies."""
    if device != "cpu":
        gc.collect()  # captured graphs hold memory of the device
        return run(package, sequence, device)
    _warm_up(package)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        done = run(package, sequence, is_last=True)
        with os.fdopen(writing, "wb") as file:
            pickle.dump(done, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    status = os.waitpid(child, 0)[1]
    if status or not answer:
        return Run(sequence, failures=[Failure("process", len(sequence), "any", f"ends with status {status}")])
    return pickle.loads(answer)


@functools.cache
def _warm_up(package: str) -> None:
    """Load kernels, once for all processes that are made of this one."""
    run(package, [(name, number) for name in ("call", "gradients", "call") for number in range(6)])
    gc.collect()
    gc.freeze()  # else a collection in each new process would touch, and so copy, all of this one's memory


def _names(subject: Subject) -> list[str]:
    return sorted(name for name, _ in subject.model.named_parameters())


def _compare(subject: Subject, wanted: list[Any], done: Run) -> None:
    """Apply the steps to another copy; ends at the first failure, or typed error of what changes a model."""
    for step, (name, number, action, results, stock_error, tolerance, names) in enumerate(wanted):
        found, error = _attempt(subject, action.do, number)
        if isinstance(error, EquituneError) and stock_error is None:
            done.ends[subject.kind] = f"{name}: {type(error).__name__}: {error}"
            if action.copies:
                continue
            return
        what = _difference(subject, name, found, error, results, stock_error, tolerance)
        if not what and error is None and names != _names(subject):
            what = f"parameters have other names: {sorted(set(names) ^ set(_names(subject)))[:3]}"
        if what:
            trace = "" if error is None else "".join(traceback.format_exception(error)[-3:])
            done.failures.append(Failure(subject.kind, step, name, what, trace))
            return


def _difference(
    subject: Subject,
    name: str,
    found: Results | None,
    error: BaseException | None,
    wanted: Results | None,
    stock_error: BaseException | None,
    tolerance: float,
) -> str:
    """In words; empty if a copy did as stock."""
    if name == "float_call":
        tolerance = IN_FLOAT32
    right = getattr(stock_error, "right", None)
    if name == "failing_call":
        tolerance = AFTER_FLOAT32  # a float32 tensor in stock's float64 model
    if name == "failing_call" and wanted is not None:
        right = {key.removeprefix("right "): value for key, value in wanted.items() if key.startswith("right ")}
        wanted = {key: value for key, value in wanted.items() if not key.startswith("right ")}
    if found is not None and right and not difference(found, right, tolerance):
        return ""
    if stock_error is not None:
        if error is not None or found is None:
            return ""
        return f"answers where stock raises {type(stock_error).__name__}: {stock_error}"
    if error is not None:
        return f"raises {type(error).__name__}: {error}"
    return difference(found or {}, wanted or {}, tolerance)


def difference(found: Results, wanted: Results, tolerance: float) -> str:
    """Relative to each result's largest number, or to a small part of that of all results of its sort."""
    largest: dict[bool, float] = {False: 0.0, True: 0.0}
    for name, value in wanted.items():
        finite = value[value.isfinite()].abs()
        largest[_is_gradient(name)] = max(largest[_is_gradient(name)], float(finite.max()) if finite.numel() else 0.0)
    for name, value in wanted.items():
        if name not in found:
            return f"{name} is missing"
        if found[name].shape != value.shape:
            return f"{name} has shape {tuple(found[name].shape)}, stock {tuple(value.shape)}"
        if not torch.equal(found[name].isnan(), value.isnan()):
            return f"{name} is nan in other places"
        size = max(_size(value), (1e-6 if _is_gradient(name) else 1e-8) * largest[_is_gradient(name)], 1e-30)
        error = _size(found[name] - value) / size
        if not error <= tolerance:
            return f"{name} differs by {error:.1e}"
    return ""


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient")


def _size(value: torch.Tensor) -> float:
    return float(value.nan_to_num(nan=0.0).abs().max()) if value.numel() else 0.0


def drawn(draw: random.Random, most: int, without: Container[str] = ()) -> Sequence:
    names = [name for name in ACTIONS if name not in without]
    weights = [ACTIONS[name].weight for name in names]
    chosen = draw.choices(names, weights, k=draw.randint(3, most))
    for name, later in LATER.items():
        if name in chosen and later in names and draw.random() < 0.5:
            chosen.insert(draw.randint(chosen.index(name) + 1, len(chosen)), later)
    return [(name, draw.randrange(10_000)) for name in chosen]


def shortened(package: str, sequence: Sequence, failure: Failure, device: str) -> Sequence:
    """Leave actions out while the same copy fails in the same way."""
    place = 0
    while place < len(sequence):
        fewer = sequence[:place] + sequence[place + 1 :]
        found = run_apart(package, fewer, device).failures
        if any(one.signature == failure.signature for one in found):
            sequence = fewer
        else:
            place += 1
    return sequence


@dataclass
class Coverage:
    """What ran, over all sequences; prints as a table."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    sequences: int = 0
    failed: int = 0

    def add(self, index: int, done: Run) -> list[Failure]:
        """Its failures that were not seen before."""
        self.sequences += 1
        self.failed += bool(done.failures)
        self.outcomes.update(done.outcomes)
        self.ends.update(done.ends.items())
        new = [one for one in done.failures if one.signature not in self.failures]
        for one in done.failures:
            self.failures.setdefault(one.signature, []).append(index)
        return new

    def __str__(self) -> str:
        lines = ["", f"{'action':26}{'ran':>8}{'nothing to do':>16}{'stock raised':>15}"]
        for name in (*ACTIONS, "final"):
            ran, nothing, raised = (self.outcomes[name, which] for which in ("ran", "nothing", "stock raised"))
            lines.append(f"{name:26}{ran:8}{nothing:16}{raised:15}")
        lines += ["", f"typed errors where stock goes on, at most one a sequence: {sum(self.ends.values())}"]
        lines += [f"{count:6}  {kind}: {text[:300]}" for (kind, text), count in self.ends.most_common()]
        lines += ["", f"{self.failed} of {self.sequences} sequences failed"]
        for signature, places in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(places):6}  {': '.join(signature)}  (sequences {places[:8]})")
        return "\n".join(lines)


def _is_lost(device: str) -> bool:
    """Whether nothing runs there any more, as after a device-side assertion."""
    try:
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no sequence begins after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=12, help="most actions in a sequence")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--without", nargs="*", default=(), choices=ACTIONS, help="actions that are not drawn")
    parser.add_argument("--replay", help="a sequence as it was printed, instead of drawn ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, device, begin = arguments.package, arguments.device, time.monotonic()
    if arguments.replay:
        sequences = [ast.literal_eval(arguments.replay)]
    else:
        draws = (random.Random(f"{arguments.seed} {index}") for index in range(arguments.sequences))
        sequences = [drawn(draw, arguments.length, arguments.without) for draw in draws]
    coverage = Coverage()
    for index, sequence in enumerate(sequences):
        if time.monotonic() - begin > arguments.seconds:
            break
        for failure in coverage.add(index, run_apart(name, sequence, device)):
            short = shortened(name, sequence[: failure.step + 1], failure, device)
            print(f"sequence {index}, {failure.kind}, {failure.action}: {failure.what}\n{failure.trace}", end="")
            print(f"    --package {name} --device {device} --replay '{short}'", flush=True)
        if device != "cpu" and _is_lost(device):
            print(f"the device is lost after sequence {index}: {sequence}")
            break
    print(coverage)
    spent = sum(sum(resource.getrusage(of)[:2]) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{name} on {device}, seed {arguments.seed}: {time.monotonic() - begin:.0f} s, {spent:.0f} of processors")
    return int(bool(coverage.failures))


if __name__ == "__main__":
    raise SystemExit(main())
