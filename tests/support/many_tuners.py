"""Eight tuners at once, killed and started again: run as a program by ``test_many_tuners``.

Arguments: a config, a results folder, the URL of a storage (or nothing), the number of kills. The tuners are real, with
compilers, kernels, references and comparisons. They only have no worker processes (each tuner measures in its own
process), because their imports would take minutes here. For the same reason tuners are forked from this process.

The file ``journal`` beside the results folder lists the events in order, one a line: ``begin`` and ``end`` of a trial
(process, study, schedule) and ``kill`` (process). ``end`` is written when the record is in the trial file.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import autotune.tune.run
from autotune.database import trials as trial_records
from autotune.measure.trial import Outcome
from autotune.search import shared as optuna_storage
from autotune.search.loop import SAMPLING_S, Measurer
from autotune.search.study import Proposal, Study
from autotune.tune.settings import SECONDS_EACH

TUNERS = 8
# A tuner is killed after this many new records, or after this many seconds: at the end tuners compare, without new
# records.
TRIALS_A_KILL, SECONDS_A_KILL = 3, 2.0


class WorkerInside:
    """Does the work of a ``Worker`` in this process."""

    def __init__(self, setting: Any) -> None:
        self.setting, self._session, self.fresh = setting, None, True

    def ask(self, limit_s: float, method: Any, *given: Any) -> Any:
        if self._session is None:
            self._session = self.setting.open()
        self.fresh = False
        return method(self._session, *given)

    def reopen(self, setting: Any) -> None:
        self.setting, self._session = setting, None

    def launch(self) -> None:
        pass

    settle = launch

    def close(self) -> None:
        self._session = None


def note(journal: Path, *words: Any) -> None:
    """Append a line by one write, so that lines of several processes do not mix."""
    with open(journal, "ab", buffering=0) as file:
        file.write((" ".join(map(str, words)) + "\n").encode())


def start_tuner(config: str, results: Path, storage: str | None, journal: Path) -> int:
    """Fork a tuner and return its process id. It exits with code 0 when everything is tuned."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 1
    try:
        log = os.open(results.with_name("log"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(log, 2)
        tune(config, results, storage, journal)
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(status)


def tune(config: str, results: Path, storage: str | None, journal: Path) -> None:
    finish, measure = Study.finish, Measurer.__call__

    def finishing(study: Study, proposal: Proposal, outcome: Outcome) -> dict[str, Any]:
        line = finish(study, proposal, outcome)
        if line in trial_records.read(study.path):
            note(journal, "end", os.getpid(), study.name, proposal.schedule.key.replace(" ", ""))
        return line

    def measuring(measurer: Measurer, schedule: Any, best_us: float | None) -> Outcome:
        name = f"{measurer.worker.setting.workload.label}-{measurer.direction}"
        note(journal, "begin", os.getpid(), name, schedule.key.replace(" ", ""))
        return measure(measurer, schedule, best_us)

    Study.finish, Measurer.__call__ = finishing, measuring  # type: ignore[method-assign]
    # Real but short measurements: their results do not matter here.
    SAMPLING_S["cpu"] = SECONDS_EACH["cpu"] = 0.1
    autotune.tune.run.Worker = WorkerInside  # type: ignore[attr-defined,assignment]
    autotune.tune.run.tune(config, "cpu", storage=storage, results_dir=results, with_peers=False, tuners=TUNERS)


def finished(results: Path) -> int:
    return sum(len(trial_records.read(path)) for path in results.glob("trials/*/*.jsonl"))


def main(config: str, folder: str, storage: str, kills: str) -> None:
    results, journal = Path(folder), Path(folder).with_name("journal")
    # Short enough that dead tuners are detected while the others still run.
    optuna_storage.HEARTBEAT_S, optuna_storage.GRACE_S = 1, 8
    given = (config, results, storage or None, journal)
    tuners = [start_tuner(*given) for _ in range(TUNERS)]
    left, killed_at, failed, last = int(kills), 0, 0, time.monotonic()
    while tuners:
        time.sleep(0.05)
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            tuners.remove(done)
            failed += status != 0
        count = finished(results)
        due = count >= killed_at + TRIALS_A_KILL or time.monotonic() > last + SECONDS_A_KILL
        if tuners and left and count and due:
            time.sleep(random.random())
            victim = tuners.pop(random.randrange(len(tuners)))
            note(journal, "kill", victim)
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            tuners.append(start_tuner(*given))
            left, killed_at, last = left - 1, count, time.monotonic()
    sys.exit(f"{failed} tuners failed, {left} kills are left over" if failed or left else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
