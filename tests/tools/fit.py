"""A fit of models to a teacher's energies and forces: do accelerated models learn what stock ones do?

    python tests/tools/fit.py label                                          # where SevenNet is installed
    python tests/tools/fit.py train nequip --ways stock equitune captured captured:precision=tf32 \
        --device cuda --commit $(git rev-parse --short HEAD) --record results/fit/nequip.json
    python tests/tools/fit.py summary                                        # of all records of results/fit

``label`` runs molecular dynamics of three small periodic systems with SevenNet-0, and writes frames with its energies,
forces and stresses; the last fifth of each trajectory is for validation. ``train`` fits a student of MACE or NequIP in
several ways, and writes a record. A way is ``stock``, ``equitune`` or ``captured`` (captured training steps), with
options of ``accelerate`` behind a colon. Equal seeds give all ways equal weights and batches. The losses are those of
the packages' own training; the optimizer is Adam (AMSGrad), with gradients clipped at 10, a cosine for the learning
rate, and averaged weights. These are validated in the stock model in float64, so that ways differ in training alone.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from autotune import accelerate, capture_training
from autotune.bench.contenders import RESULTS
from autotune.bench.session import synchronize
from autotune.database.maintenance import driver_version, now_text, software_versions
from autotune.models.capture import Real
from autotune.models.whole_model import DTYPES, WholeModel, build_published, open_made, published_models
from kernelgen.device import device_facts

FOLDER = Path(__file__).resolve().parents[2] / "results" / "fit"

# The teacher's frames.

TEACHER = "7net-0"
# Of each system: temperatures in kelvin, and the time step in femtoseconds.
SYSTEMS = {"water": ((300, 450, 600), 0.5), "diamond": ((500, 1500, 3000), 1.0), "MgO": ((500, 1200, 2000), 1.0)}
# Of each trajectory: frames, steps between them, steps before the first. Every second frame is rattled too (angstrom).
SAMPLED, APART, BEFORE, RATTLED = 20, 10, 60, 0.03
# What is stored of a frame, [frames, ...], and in which type. K, angstrom, eV, eV/angstrom, eV/angstrom^3.
KINDS = {
    "temperature": np.int64,
    "numbers": np.uint8,
    "positions": np.float32,
    "cell": np.float64,
    "energy": np.float64,
    "forces": np.float32,
    "stress": np.float32,
}


class Frames(NamedTuple):
    """Structures with labels: energies in eV, of which a sum over elements is taken off, forces in eV/angstrom."""

    atoms: list[Any]
    energy: np.ndarray
    forces: list[np.ndarray]

    def chosen(self, places: Any) -> Frames:
        return Frames([self.atoms[k] for k in places], self.energy[places], [self.forces[k] for k in places])


def start(system: str) -> Any:
    from ase.build import bulk

    from autotune.workload.graphs import Water

    if system == "water":
        return Water(3).atoms()
    return (bulk("C", cubic=True) if system == "diamond" else bulk("MgO", "rocksalt", 4.25, cubic=True)) * (2, 2, 2)


def trajectory(system: str, temperature: float, step_fs: float, calculator: Any, seed: int) -> Iterator[Any]:
    """Copies of the atoms on the way, with positions as they are stored."""
    from ase import units
    from ase.md.langevin import Langevin
    from ase.md.velocitydistribution import MaxwellBoltzmannDistribution
    from ase.optimize import FIRE

    random, atoms = np.random.default_rng(seed), start(system)
    atoms.calc = calculator
    if system == "water":  # its molecules are turned at random
        FIRE(atoms, logfile=None).run(fmax=0.5, steps=60)
    MaxwellBoltzmannDistribution(atoms, temperature_K=temperature, rng=random)
    given = {"temperature_K": temperature, "friction": 0.02 / units.fs, "rng": random, "fixcm": False}
    dynamics = Langevin(atoms, step_fs * units.fs, **given)
    dynamics.run(BEFORE)
    for place in range(SAMPLED):
        dynamics.run(APART)
        frame = atoms.copy()
        if place % 2:
            frame.rattle(RATTLED, rng=random)
        frame.set_positions(frame.positions.astype(KINDS["positions"]))
        yield frame


def label(system: str, folder: Path, seed: int) -> None:
    """The dynamics runs with the accelerated teacher, to save time; labels are the stock teacher's, in float32."""
    from sevenn.calculator import SevenNetCalculator

    stock, fast = (SevenNetCalculator(TEACHER, device="cpu") for _ in range(2))
    accelerate(fast)
    found: dict[str, list[Any]] = {name: [] for name in KINDS}
    temperatures, step_fs = SYSTEMS[system]
    for temperature in temperatures:
        for frame in trajectory(system, temperature, step_fs, fast, seed + temperature):
            frame.calc = stock
            energy, forces, stress = frame.get_potential_energy(), frame.get_forces(), frame.get_stress(voigt=False)
            row = (temperature, frame.numbers, frame.positions, frame.cell.array, energy, forces, stress)
            for values, value in zip(found.values(), row, strict=True):
                values.append(value)
        print(f"{system} {temperature} K: {len(frame)} atoms, {energy / len(frame):.4f} eV an atom", flush=True)
    arrays = {name: np.array(values, KINDS[name]) for name, values in found.items()}
    about = {
        "teacher": TEACHER,
        "made": now_text(),
        "software": software_versions(device_facts("cpu"), ("sevenn", "ase")),
    }
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{system}.npz", about=json.dumps(about), **arrays)


def frame_files() -> list[Path]:
    return [FOLDER / f"{system}.npz" for system in SYSTEMS]


def read_frames() -> tuple[Frames, Frames]:
    """Frames to learn from, and those to validate with: the last fifth of each trajectory."""
    from ase import Atoms

    atoms, energy, forces, last = [], [], [], []
    for path in frame_files():
        stored = np.load(path)
        for k, temperature in enumerate(stored["temperature"]):
            atoms.append(
                Atoms(stored["numbers"][k], stored["positions"][k].astype(float), cell=stored["cell"][k], pbc=True)
            )
            last.append((stored["temperature"][:k] == temperature).sum() >= SAMPLED * 4 // 5)
        energy += [*stored["energy"]]
        forces += [*stored["forces"]]
    learned, others = np.flatnonzero(~np.array(last)), np.flatnonzero(last)
    # As isolated atoms' energies are: what a model need not learn. A least-squares fit, without the validation.
    elements = sorted({int(number) for one in atoms for number in one.numbers})
    counts = np.array([[(one.numbers == element).sum() for element in elements] for one in atoms], float)
    of_elements = np.linalg.lstsq(counts[learned], np.array(energy)[learned], rcond=None)[0]
    every = Frames(atoms, np.array(energy) - counts @ of_elements, forces)
    return every.chosen(learned), every.chosen(others)


# The students, and how they learn.

# The published form of a model, and what is smaller here.
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mace": ("mace-off23-small", {"hidden_irreps": "64x0e + 64x1o"}),
    "nequip": ("nequip-small", {"cutoff": 4.5, "num_layers": 3, "num_features": 32}),
}
# Of the mean squares of energies an atom and of forces: each package's own.
WEIGHTS = {"mace": (1.0, 100.0), "nequip": (1.0, 1.0)}
# Of the frames; neighbours within 4.5 angstrom, on average.
SPECIES, NEIGHBORS = "1, 6, 8, 12", 46.0
LEARNING_RATE, CLIPPED, AVERAGED = 0.01, 10.0, 0.99
# Sizes of batches that stay captured.
KEPT = 16


def build(student: str, frames: Frames, seed: int, dtype: str, device: str) -> WholeModel:
    """Untrained, scaled by the root of the mean square of the forces, as both packages do."""
    scale = float(np.sqrt(np.mean(np.square(np.concatenate(frames.forces)))))
    name, smaller = STUDENTS[student]
    published = published_models()[name]
    of_frames = {"species": SPECIES, "avg_num_neighbors": NEIGHBORS, "scale": scale, "shift": 0.0}
    given = replace(published, parameters=published.parameters | of_frames | smaller)
    return open_made(student, build_published(given, DTYPES[dtype], seed), device=device)


class Batch(NamedTuple):
    inputs: dict[str, Any]
    labels: dict[str, torch.Tensor]


def batches_of(model: WholeModel, frames: Frames, size: int, seed: int) -> list[Batch]:
    """The frames in an order of the seed's; batches are the same in every epoch."""
    order, made = np.random.default_rng(seed).permutation(len(frames.atoms)), []
    for begin in range(0, len(order), size):
        part = frames.chosen(order[begin : begin + size])
        counts = torch.tensor(list(map(len, part.atoms)))
        labels = {
            "energy": torch.tensor(part.energy),
            "forces": torch.tensor(np.concatenate(part.forces)),
            "atoms": counts,
        }
        labels = {name: one.to(model.device, model.dtype) for name, one in labels.items()}
        made.append(Batch(model.inputs(part.atoms), labels))
    return made


def loss_of(student: str, energy: torch.Tensor, forces: torch.Tensor, labels: Any, real: Real) -> torch.Tensor:
    """Of MACE its ``WeightedEnergyForcesLoss``, of NequIP its ``EnergyForceLoss``, each with its package's weights."""
    of_energies, of_forces = WEIGHTS[student]
    energies = (energy.view(-1) - labels["energy"]) / labels["atoms"]
    found = of_forces * real.mean((forces - labels["forces"]).square(), "atoms")
    return of_energies * real.mean(energies.square(), "graphs") + found


def training_step(model: WholeModel, captured: bool) -> Any:
    """A function that computes the loss of a batch, and leaves gradients in the parameters."""
    package, module = model.package, model.module.train()
    if captured:
        energy, forces = RESULTS[package.name]

        def loss(out: Any, labels: Any, real: Real) -> torch.Tensor:
            return loss_of(package.name, out[energy], out[forces], labels, real)

        step = capture_training(module, loss, kept=KEPT)
        return lambda batch: step(batch.inputs, batch.labels)

    def eager(batch: Batch) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        out = package.evaluate(module, batch.inputs, training=True, stress=False)
        real = Real(torch.ones_like(batch.labels["forces"][:, 0]), len(batch.labels["energy"]))
        loss = loss_of(package.name, out.energy, out.forces, batch.labels, real)
        loss.backward()
        return loss.detach()

    return eager


def parsed(way: str) -> tuple[str, dict[str, Any]]:
    """``captured:precision=tf32,check=false`` as its name and the options of ``accelerate``."""
    name, _, text = way.partition(":")
    pairs = dict(pair.split("=", 1) for pair in text.split(",") if pair)
    if name not in ("stock", "equitune", "captured") or (name == "stock" and pairs):
        raise SystemExit(
            f"way {way!r}; expected stock, equitune or captured, the last two with options: equitune:precision=tf32"
        )
    words = {"true": True, "false": False}
    return name, {option: words.get(value, value) for option, value in pairs.items()}


def learn(
    model: WholeModel, way: str, batches: list[Batch], steps: int, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train the model in place. Its weights, averaged over the last steps, by name; and what is to be recorded."""
    name, options = parsed(way)
    named = dict(model.module.named_parameters())  # the same objects, whatever the model's modules become
    said = "" if name == "stock" else str(accelerate(model.module, **options)).splitlines()[0]
    step, weights = training_step(model, name == "captured"), list(named.values())
    averaged = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.Adam(weights, lr=LEARNING_RATE, amsgrad=True)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order, losses, times = np.random.default_rng(seed), [], []
    while len(losses) < steps:
        for place in order.permutation(len(batches))[: steps - len(losses)]:
            if len(losses) in (0, steps // 2):
                synchronize(model.device)
                times.append(time.perf_counter())
            losses.append(step(batches[place]))
            torch.nn.utils.clip_grad_norm_(weights, CLIPPED)
            optimizer.step()
            rate.step()
            done = len(losses)
            share = 1 - min(AVERAGED, (1 + done) / (10 + done))
            torch._foreach_lerp_(averaged, [weight.detach() for weight in weights], share)
    synchronize(model.device)
    times.append(time.perf_counter())
    return dict(zip(named, averaged, strict=True)), {
        "said": said,
        "seconds": round(times[-1] - times[0], 2),
        "ms_a_step": round((times[-1] - times[-2]) / (steps - steps // 2) * 1e3, 3),
        "losses": torch.stack(losses).tolist(),
    }


# What was learned.


def errors(energies: np.ndarray, forces: np.ndarray, frames: Frames) -> dict[str, float]:
    """Mean absolute errors and roots of mean squares: meV an atom, meV/angstrom.

    Stresses are no measure of what was learned: at fixed volumes energies and forces leave the pressure free.
    """
    found, counts = {}, np.array(list(map(len, frames.atoms)))
    differences = {
        "energy": (energies - frames.energy) / counts,
        "forces": forces - np.concatenate(frames.forces),
    }
    for name, difference in differences.items():
        found[f"{name}_mae"] = float(np.abs(difference).mean() * 1e3)
        found[f"{name}_rmse"] = float(np.sqrt(np.square(difference).mean()) * 1e3)
    return found


def validate(model: WholeModel, frames: Frames, size: int = 9) -> dict[str, float]:
    outs = []
    for begin in range(0, len(frames.atoms), size):
        out = model.energies_and_forces(model.inputs(frames.atoms[begin : begin + size]))
        outs.append([one.detach().cpu().numpy() for one in (out.energy, out.forces)])
    return errors(*(np.concatenate(parts) for parts in zip(*outs, strict=True)), frames)


def text_of(record: dict[str, Any]) -> str:
    """JSON, a run a line."""
    runs = ",\n".join(map(json.dumps, record["runs"]))
    return json.dumps(record | {"runs": []}).removesuffix("]}") + f"\n{runs}\n]}}\n"


def said_of(run: dict[str, Any]) -> str:
    if "failed" in run:
        return f"failed: {run['failed']}"
    found = run["validation"]
    return (
        f"{run['seconds']:.0f} s, {run['ms_a_step']:.1f} ms a step, energies {found['energy_mae']:.2f} meV an atom, "
        f"forces {found['forces_mae']:.1f} meV/angstrom"
    )


def train(given: argparse.Namespace) -> None:
    """Every way with every seed, and the record after each. A run that fails is recorded as failed."""
    for way in given.ways:
        parsed(way)
    learned, others = read_frames()
    facts = device_facts(given.device)
    zeros = [np.zeros_like(one) for one in (others.energy, np.concatenate(others.forces))]
    record: dict[str, Any] = {
        "format": 1,
        "student": given.student,
        "device": facts.name,
        "driver": driver_version(facts),
        "date": now_text(),
        "commit": given.commit,
        "software": software_versions(facts, ("nequip", "ase")),
        "frames": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in frame_files()},
        "learned": len(learned.atoms),
        "validated": len(others.atoms),
        "model": STUDENTS[given.student],
        **{name: getattr(given, name) for name in ("steps", "batch", "dtype")},
        "baseline": errors(*zeros, others),
        "runs": [],
    }
    for seed in given.seeds:
        stock = build(given.student, learned, seed, given.dtype, given.device)
        batches = batches_of(stock, learned, given.batch, seed)
        for way in given.ways:
            run: dict[str, Any] = {"way": way, "seed": seed}
            try:
                model = stock.with_module(copy.deepcopy(stock.module))
                weights, found = learn(model, way, batches, given.steps, seed)
                parts = np.array_split(found["losses"], min(20, given.steps))
                run |= found | {"losses": [float(f"{part.mean():.5g}") for part in parts]}
                plain = build(given.student, learned, seed, "float64", given.device)
                with torch.no_grad():
                    for name, weight in plain.module.named_parameters():
                        weight.copy_(weights[name])
                run["validation"] = validate(plain, others)
            except Exception as error:  # whatever a package raises: the other runs go on
                traceback.print_exc()
                run["failed"] = f"{type(error).__name__}: {error}"[:500]
            model = plain = None
            gc.collect()
            record["runs"].append(run)
            given.record.parent.mkdir(parents=True, exist_ok=True)
            given.record.write_text(text_of(record))
            print(f"{given.student} {way} seed {seed}: {said_of(run)}", flush=True)


# Of all records: stock and the other ways beside each other.

# What is judged, and shown.
JUDGED = {"energy_mae": "energies, meV an atom", "forces_mae": "forces, meV/angstrom"}


def judged(runs: list[dict[str, Any]], stock: list[dict[str, Any]]) -> str:
    """Whether the means of a way's errors lie among those of stock's seeds, in words."""
    failed, stock = sum("failed" in run for run in runs), [run for run in stock if "failed" not in run]
    if failed:
        return f"{failed} of {len(runs)} failed"
    if len(stock) < 3:
        return "fewer than three seeds of stock"
    if sorted(run["seed"] for run in runs) != sorted(run["seed"] for run in stock):
        return "not the seeds of stock"
    off = []
    for name, title in JUDGED.items():
        of_stock = [run["validation"][name] for run in stock]
        mean = statistics.fmean(run["validation"][name] for run in runs)
        if not min(of_stock) <= mean <= max(of_stock):
            off.append(f"{title.split(',')[0]} {mean / statistics.fmean(of_stock) - 1:+.1%}")
    return "outside: " + ", ".join(off) if off else "within"


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """A table in Markdown: of each way the mean over its seeds, and the range."""
    rows = [["student, device", "way", *JUDGED.values(), "ms a step", "among stock's seeds"]]
    rows.append(["---", "---", *["---:"] * (len(JUDGED) + 1), "---"])
    for record in records:
        ways: dict[str, list[dict[str, Any]]] = {}
        for run in record["runs"]:
            ways.setdefault(run["way"], []).append(run)
        first = f"{record['student']}, {record['device']}"
        rows.append([first, "zeros", *(f"{record['baseline'][name]:.2f}" for name in JUDGED), "", ""])
        for way, runs in ways.items():
            cells = []
            done = [run for run in runs if "failed" not in run]
            for values in ([run["validation"][name] for run in done] for name in JUDGED):
                shown = f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "-"
                cells.append(shown)
            times = f"{statistics.median(run['ms_a_step'] for run in done):.1f}" if done else "-"
            rows.append([first, way, *cells, times, judged(runs, ways.get("stock", [])) if way != "stock" else ""])
    return ["| " + " | ".join(row) + " |" for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    one = steps.add_parser("label")
    one.add_argument("systems", nargs="*", default=list(SYSTEMS), help="all by default")
    one.add_argument("--folder", type=Path, default=FOLDER)
    one.add_argument("--seed", type=int, default=0)
    one = steps.add_parser("train")
    one.add_argument("student", choices=tuple(STUDENTS))
    one.add_argument("--ways", nargs="+", default=["stock", "equitune"], help="such as stock captured:precision=tf32")
    one.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    one.add_argument("--steps", type=int, default=400)
    one.add_argument("--batch", type=int, default=6, help="frames")
    one.add_argument("--dtype", default="float32", choices=tuple(DTYPES))
    one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    one.add_argument("--commit", required=True, help="of the checkout, for the record")
    one.add_argument("--record", type=Path, required=True, help="a file, JSON")
    one = steps.add_parser("summary")
    one.add_argument("records", nargs="*", type=Path, help="all of results/fit by default")
    given = parser.parse_args()
    if given.step == "label":
        for system in given.systems:
            label(system, given.folder, given.seed)
    elif given.step == "train":
        train(given)
    else:
        paths = given.records or sorted(FOLDER.glob("*.json"))
        print("\n".join(summary([json.loads(path.read_text()) for path in paths])))


if __name__ == "__main__":
    main()
