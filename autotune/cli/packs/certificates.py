"""What the tuned databases tell of kernels that were checked, for the kernels that a pack has."""

from __future__ import annotations

from typing import Any

from autotune.database.store import database_dirs, device_files, load_table


def certificates() -> dict[str, dict[str, Any]]:
    """By the first 16 digits of a kernel's source: its errors against float64 e3nn and under rotation, and the run.

    From entries with a certificate; see ``autotune.database.entry.Entry`` for the fields.
    """
    found = {}
    for folder in database_dirs():
        for path in device_files(folder):
            table = load_table(path)
            for entry in table.by_identity.values():
                if entry.source and entry.certificate:
                    told = {
                        name: getattr(entry, name) for name in ("errors", "tolerance", "date", "generator", "graph")
                    }
                    told["device"] = table.device.get("name", path.stem)
                    found[entry.source] = {**entry.certificate, **told}
    return found
