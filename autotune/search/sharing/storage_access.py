"""Access to an Optuna storage that may be temporarily unavailable.

If the server restarts, tuners wait up to two minutes, then raise one clear error. Messages never show the URL's
password.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.errors import StudyError
from autotune.search.samplers import making, sqlite_file

if TYPE_CHECKING:
    import optuna

# How long to wait for a storage that does not answer, and the pause between two tries.
WAIT_S, RETRY_S = 120, 0.5
# Tries before a warning: if two tuners create the tables at once, one fails, and succeeds at the next try.
QUIET_TRIES = 3
T = TypeVar("T")
# One storage per URL and process, because opening it takes longer than a trial, and every study needs it.
_opened: dict[tuple[str, int, int], optuna.storages.RDBStorage] = {}


class Access:
    """Access to one storage. ``kept_in``: the file that holds all measurements, even if the storage fails.

    heartbeat_s, grace_s: as Optuna's ``heartbeat_interval`` and ``grace_period``.
    """

    def __init__(
        self, storage: str | optuna.storages.BaseStorage, kept_in: Path, heartbeat_s: int, grace_s: int
    ) -> None:
        self._storage, self._kept_in, self._beats = storage, kept_in, (heartbeat_s, grace_s)
        self._shown, self._gone = _shown(storage), False

    def open(self) -> optuna.storages.BaseStorage:
        """Open the storage; StudyError at once for an invalid URL."""
        return self.patiently(lambda: _open(self._storage, *self._beats))

    def patiently(self, action: Callable[[], T]) -> T:
        """Run the action, and retry for a while if the storage does not answer."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import DBAPIError

        tries, end = 0, time.monotonic() + WAIT_S
        while True:
            try:
                result = action()
            except (StorageInternalError, DBAPIError) as error:
                reason = " ".join(str(error.__cause__ or error).split())[:200]
                self._gone = self._gone or time.monotonic() >= end
                if self._gone:
                    raise StudyError(
                        f"the storage {self._shown} does not answer ({reason}). No measurement is lost: all "
                        f"are in {self._kept_in}. Check that the storage runs, then run the same command again"
                    ) from error
                tries += 1
                if tries == QUIET_TRIES:
                    _tell(f"the storage {self._shown} does not answer ({reason}); waiting up to {WAIT_S} s")
                time.sleep(RETRY_S)
            else:
                if tries >= QUIET_TRIES:
                    _tell(f"the storage {self._shown} answers again")
                return result


def _open(storage: str | optuna.storages.BaseStorage, heartbeat_s: int, grace_s: int) -> optuna.storages.BaseStorage:
    import optuna
    from sqlalchemy.exc import ArgumentError

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not isinstance(storage, str):
        return storage
    if (given := (storage, heartbeat_s, grace_s)) in _opened:
        return _opened[given]
    file = sqlite_file(storage)
    options = {"connect_args": {"timeout": WAIT_S}} if file else {"pool_pre_ping": True}
    with warnings.catch_warnings(), making(file) if file else contextlib.nullcontext():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        try:
            opened = optuna.storages.RDBStorage(storage, options, heartbeat_interval=heartbeat_s, grace_period=grace_s)
        except ImportError as error:
            raise StudyError(
                f"Optuna storage {_shown(storage)} needs a package that is not installed ({error.__cause__ or error}); "
                "for PostgreSQL: pip install 'equitune[postgres]' and postgresql+psycopg://USER@HOST/DATABASE"
            ) from error
        except (ArgumentError, ValueError, RuntimeError) as error:
            raise StudyError(f"Optuna storage {_shown(storage)} cannot be used: {error}") from error
    _opened[given] = opened
    return opened


def _shown(storage: Any) -> str:
    """The storage's URL without its password."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    if not isinstance(storage, str):
        return type(storage).__name__
    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return repr(storage)


def _tell(text: str) -> None:
    """Warn, with the time in the text, because Python shows equal warnings only once."""
    warnings.warn(f"{datetime.now(timezone.utc):%H:%M:%S} UTC: {text}", stacklevel=2)
