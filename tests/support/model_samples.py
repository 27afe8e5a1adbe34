"""A made-up record of whole models, for tests of pages alone: no number in it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_samples import DEVICE, SLUG, write

STRUCTURES = {"made-up-molecule": (21, 306), "made-up-liquid": (5184, 460_710)}
ORIGIN = {"date": "2026-01-02T03:04:05+00:00", "host": "made-up"}
PACKAGES = {"made-up-mace": "mace", "made-up-sevennet": "sevennet"}


def figures(wall_ms: float, atoms: int, **more: Any) -> dict[str, Any]:
    """One contender with every key."""
    return {
        "wall_ms": wall_ms, "wall_samples_ms": [wall_ms * factor for factor in (0.99, 1.0, 1.02)],
        "device_ms": wall_ms * 0.8, "launches": 594, "peak_mib": wall_ms * 20, "us_per_atom": 1e3 * wall_ms / atoms,
        "held_parts_mib": {"layers.convolution": wall_ms * 12, "layers.contraction": wall_ms * 4},
        "host_ms": wall_ms * 0.4, "first_call_s": 3.5,
        "errors": {"energy": 2.5e-8, "forces": 3.75e-7, "stress": 1e-7, "gradients": 2e-6},
    } | ORIGIN | more  # fmt: skip


def model_row(model: str, structure: str, which: str, ratio: float = 1.5, **changes: Any) -> dict[str, Any]:
    """A row on which Equitune is ``ratio`` times as fast as the fastest other path (cuEquivariance)."""
    atoms, edges = STRUCTURES[structure]
    ours = round(20 + edges * (1e-4 if which == "energy_forces" else 3e-4), 3)
    package = PACKAGES[model]
    command = f"equitune bench --models {model} --structures {structure} --passes {which}"
    contenders: dict[str, Any] = {
        "equitune": figures(ours, atoms), "equitune-default": figures(ours * 1.25, atoms),
        "stock": figures(ours * 12, atoms), "cuequivariance": figures(ours * ratio, atoms),
        "openequivariance": figures(ours * (ratio + 0.5), atoms),
        "cuequivariance+openequivariance": {"error": f"{package} refuses <both> at once"} | ORIGIN,
    }  # fmt: skip
    row = {
        "model": model, "package": package, "structure": structure, "atoms": atoms, "edges": edges, "pass": which,
        "dtype": "float32", "software": {"torch": "2.11.0", package: "0.0.0"}, "command": command,
        "contenders": contenders,
    }  # fmt: skip
    return row | changes


def all_rows() -> list[dict[str, Any]]:
    """Two models on two structures in two passes; one has no memory for stock, one is slower than another path.

    One also ran by Equitune and cuEquivariance together, in half of Equitune's time.
    """
    rows = [model_row(model, structure, which) for model in PACKAGES for structure in STRUCTURES
            for which in ("energy_forces", "training")]  # fmt: skip
    rows[2]["contenders"]["equitune+cuequivariance"] = figures(rows[2]["contenders"]["equitune"]["wall_ms"] / 2, 5184)
    rows[3]["contenders"]["stock"] = {"error": "out of memory <on this device>"}
    rows[6] = model_row("made-up-sevennet", "made-up-liquid", "energy_forces", 0.9)
    return rows


def largest_row(model: str = "made-up-mace") -> dict[str, Any]:
    """A row of the largest crystals: stock stops early, one path failed at once, one was interrupted."""

    def cell(atoms: int, why: str = "out of memory") -> dict[str, Any]:
        found = {"atoms": atoms, "edges": 158 * atoms, "wall_ms": atoms / 64, "peak_mib": 2.0 * atoms}
        return {"largest": found, "ended": {"atoms": 2 * atoms, "why": why}}

    contenders = {
        "equitune": cell(32_768), "equitune-streamed": cell(131_072, "time limit of 240 s"), "stock": cell(4096),
        "cuequivariance": {"largest": cell(16_384)["largest"]}, "openequivariance": {"error": "refuses <all>"},
    }  # fmt: skip
    row = model_row(model, "made-up-liquid", "energy_forces")
    given = {"structure": "diamond", "pass": "largest", "atoms": 131_072, "edges": 158 * 131_072}
    return row | given | {"contenders": contenders, "command": f"equitune bench --models --model {model} --largest"}


def write_models(folder: Path, rows: list[dict[str, Any]] | None = None, slug: str = SLUG) -> Path:
    """Adds the record to a results folder."""
    (folder / "models").mkdir(parents=True, exist_ok=True)
    record = {"format": 1, "device": DEVICE | {"slug": slug}, "rows": all_rows() if rows is None else rows}
    write(folder / "models" / f"{slug}.json", record)
    return folder
