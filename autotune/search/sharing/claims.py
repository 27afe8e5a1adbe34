"""Where the tuners of one study meet: what each is measuring, so that no other does, and what all have finished.

Claims of schedules and finished records enter; the records of others leave. :class:`FolderClaims` joins the tuners of
one results folder by its trial file and by locks that die with their process. A tuner that works alone takes the same
steps and keeps everybody else out: they cost it microseconds. ``autotune.search.sharing.optuna_storage`` joins several
hosts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from autotune.database import trial_archive, trial_records
from autotune.errors import StudyError
from autotune.search.sharing.locks import Locks
from kernelgen.schedule.knobs import Knobs

# Who else may work on a study: nobody; tuners of the same results folder; all that name the same Optuna storage.
Sharing = Literal["alone", "folder", "storage"]
# Claimed beside schedules: the comparison that publishes a workload's winners, and the copy for the Optuna storage.
COMPARISON, COPY = "comparison", "copy"
# Locks of a study: taking part in it, writing its file, copying it; then those of claims that mean work on the device.
PART, WRITING, COPYING, CLAIMS = range(4)


class Claims:
    """Of a rehearsal: nobody else is there, and nothing is kept."""

    # Records so far, those of other generator versions included.
    count = 0

    def news(self) -> list[dict[str, Any]]:
        """Records that were not given before: at first all there are, later what anybody finished meanwhile."""
        return []

    def claim(self, key: str, schedule: Knobs | None = None) -> bool:
        """Whether this tuner may measure a schedule (or do what else the key stands for): then no other may."""
        return True

    def let_go(self, key: str) -> None:
        """Give up a claim without a result."""

    def finish(self, key: str, line: dict[str, Any]) -> dict[str, Any]:
        """Make the record of a claimed schedule durable; returns it as it stands there, numbered."""
        line = {**line, "number": self.count}
        self.count += 1
        return line

    def contribute(self, key: str, schedule: Knobs, line: dict[str, Any]) -> None:
        """Give others a record of an earlier run that they may not know."""

    def others_at_work(self, wait: bool = False, comparing: bool = False) -> bool:
        """Is another tuner measuring here, or comparing? ``wait``: where that cannot be told at once, until it can.

        Who seems to compare is taken at its word, but with ``comparing``.
        """
        return False

    def close(self) -> None:
        """Leave; claims end."""


class FolderClaims(Claims):
    """Of the tuners that share a results folder, or of one that works there ``alone``: see the module."""

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
        """The claim ends after the record is on the disk: who gets it next finds the record."""
        line = self.kept(line)
        self.let_go(key)
        return line

    def kept(self, line: dict[str, Any]) -> dict[str, Any]:
        """The record as it stands in the file now."""
        self.keep([line])
        return next(
            (known for known in self._unread if trial_records.identity(known) == trial_records.identity(line)), line
        )

    def keep(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the records that the file does not have."""
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
    """Two keys of one number would only be claimed one after the other."""
    if key == COPY:
        return COPYING
    return CLAIMS + int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
