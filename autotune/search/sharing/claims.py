"""Claims of the tuners of one study: each schedule is measured by one tuner, and all read every finished record.

:class:`FolderClaims` connects the tuners of one results folder, through its trial file and locks that end with their
process. A tuner that works alone takes the same steps, which cost microseconds, and locks others out.
``autotune.search.sharing.optuna_storage`` connects several hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from autotune.database import trials as trial_archive
from autotune.database import trials as trial_records
from autotune.errors import StudyError
from autotune.search.sharing.locks import Locks
from kernelgen.kernels.knobs import Knobs

# Who may share a study: nobody; tuners of the same results folder; all that name the same Optuna storage.
Sharing = Literal["alone", "folder", "storage"]
# Other claims than schedules: the comparison that publishes a workload's winners, and the copy to the Optuna storage.
COMPARISON, COPY = "comparison", "copy"
# Lock numbers of a study: taking part, writing its file, copying it; claims that use the device have higher numbers.
PART, WRITING, COPYING, CLAIMS = range(4)


class Claims:
    """Claims of a simulated search: no other tuners, and nothing is stored."""

    # Number of records so far, those of other generator versions included.
    count = 0

    def news(self) -> list[dict[str, Any]]:
        """Records not returned before: at first all, later those finished meanwhile by any tuner."""
        return []

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        """Claim a schedule (or what else the key stands for); False if another tuner has it."""
        return True

    def let_go(self, key: str) -> None:
        """Release a claim without a result."""

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """Store the record of a claimed schedule durably; returns it as stored, with its number."""
        line = {**line, "number": self.count}
        self.count += 1
        return line

    def contribute(self, key: str, schedule: Knobs, line: dict[str, Any]) -> None:
        """Share a record of an earlier run that others may not have."""

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        """Whether another tuner is measuring or comparing. ``wait``: if this is uncertain, wait until it is certain.

        A claimed comparison counts as certain unless ``comparing``.
        """
        return False

    def close(self) -> None:
        """Leave the study; this tuner's claims end."""


class FolderClaims(Claims):
    """Claims of tuners that share a results folder, or of one that works there ``alone``."""

    def __init__(self, path: Path, alone: bool) -> None:
        self.path = path
        self._locks = Locks(trial_records.lock_path(path))
        self._offset, self._unread, self._known = 0, list[dict[str, Any]](), set[tuple[str, str]]()
        self._begun = False
        if not (self._locks.take(PART) if alone else self._locks.share(PART)):
            self._locks.close()
            what = "another process is tuning" if alone else "a tuner without --shared is tuning"
            raise StudyError(
                f"{what} {path}; wait for it, choose another results folder, or start all tuners of this one with "
                "--shared (those of several GPUs with --devices)"
            )

    def close(self) -> None:
        self._locks.close()

    def news(self) -> list[dict[str, Any]]:
        self._catch_up()
        lines, self._unread = self._unread, []
        return lines

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        return self._locks.take(_number(key))

    def let_go(self, key: str) -> None:
        self._locks.let_go(_number(key))

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """End the claim after the record is on the disk, so that the next tuner to claim it finds the record."""
        line = self.kept(line)
        self.let_go(key)
        return line

    def kept(self, line: dict[str, Any]) -> dict[str, Any]:
        """The record as stored in the file."""
        self.keep([line])
        return next(
            (known for known in self._unread if trial_records.identity(known) == trial_records.identity(line)), line
        )

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the records that the file lacks."""
        with self._locks.held(WRITING):
            self._catch_up()
            for line in lines:
                if trial_records.identity(line) not in self._known:
                    trial_records.append(self.path, {**line, "number": self.count})
                    self._catch_up()

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        return self._locks.taken_elsewhere(CLAIMS)

    def _catch_up(self) -> None:
        lines, self._offset = trial_records.read_from(self.path, self._offset)
        known = {trial_records.identity(line) for line in lines}
        if not self._begun:
            packed, self._begun = trial_archive.packed_only(self.path, known), True
            lines = packed + lines
            known |= {trial_records.identity(line) for line in packed}
        self.count += len(lines)
        self._known |= known
        self._unread += lines


def _number(key: str) -> int:
    """The lock number of a key. A collision is harmless: the two keys just cannot be claimed at the same time."""
    if key == COPY:
        return COPYING
    return CLAIMS + int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
