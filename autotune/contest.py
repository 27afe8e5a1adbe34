"""A fair comparison: schedules of ours and peers, measured in turn in one fresh process on the same tensors.

A workload, named schedule sets of ours and the passes to time enter; a :class:`Result` for every contender and pass
leaves. Every contender is checked against float64 e3nn before its numbers count, warmed up, and sampled round-robin,
so that drift of clocks and neighbours' load meet all alike. A contender that fails is an error, not a number; one
that takes the process down is named as such, and the contest is held again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.contest_session import (
    Answer,
    ContestSetting,
    CopyBandwidth,
    PeerNames,
    PrepareOurs,
    PreparePeer,
    Release,
    Sample,
    Schedules,
    WarmUp,
)
from autotune.worker import Worker, WorkerLost

if TYPE_CHECKING:
    from autotune.measure import Timing

PASSES = ("forward", "backward", "double_backward", "forward+backward")
DIRECTIONS_OF = {name: (name,) for name in PASSES[:3]} | {"forward+backward": ("forward", "backward")}
OUR_MIN_SAMPLES = 10
PEER_MIN_SAMPLES = 5
MAX_SAMPLES = 60
PREPARE_LIMIT_S = 600.0
SAMPLE_LIMIT_S = 120.0


@dataclass(frozen=True)
class Result:
    """Of one contender in one pass: a timing, or why there is none."""

    timing: Timing | None = None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.error} if self.timing is None else self.timing.to_dict()

    def summary(self) -> dict[str, Any]:
        """Without the raw samples, as database entries hold it."""
        data = self.to_dict()
        data.pop("samples_us", None)
        return data


@dataclass(frozen=True)
class ContestResult:
    """results: contender -> pass -> result. errors and resources: of our contenders, by contender and direction."""

    results: dict[str, dict[str, Result]]
    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    resources: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    copy_bandwidth: float = 0.0


def hold_contest(
    setting: ContestSetting,
    passes: tuple[str, ...],
    ours: Mapping[str, Schedules],
    *,
    seconds_each: float = 2.0,
    on_step: Callable[[str], None] = lambda text: None,
) -> ContestResult:
    """Compare in ``passes``. A schedule set of ours takes part in the passes whose directions it names.

    seconds_each: about how long every contender is sampled in every pass.
    """
    fallen: dict[tuple[str, str], str] = {}
    while True:
        try:
            with Worker(setting) as worker:
                return _Contest(worker, passes, ours, seconds_each, fallen, on_step).hold()
        except _Fallen as end:
            fallen[end.name, end.which] = end.reason


class _Fallen(Exception):
    """A contender took the process (or its device) down; ``which`` is the pass, or empty for its preparation."""

    def __init__(self, name: str, which: str, reason: str) -> None:
        super().__init__(f"{name} {which}: {reason}")
        self.name, self.which, self.reason = name, which, reason


@dataclass
class _Contest:
    worker: Worker
    passes: tuple[str, ...]
    ours: Mapping[str, Schedules]
    seconds_each: float
    fallen: Mapping[tuple[str, str], str]
    on_step: Callable[[str], None]

    def hold(self) -> ContestResult:
        jobs: list[PrepareOurs | PreparePeer] = [PrepareOurs(name, sets) for name, sets in self.ours.items()]
        jobs += [PreparePeer(name) for name in self.worker.call(PeerNames(), PREPARE_LIMIT_S)]
        prepared = {job.name: self._call(job.name, "", job, PREPARE_LIMIT_S) for job in jobs}
        results: dict[str, dict[str, Result]] = {name: {} for name in prepared}
        for which in self.passes:
            entered = {name: answer for name, answer in prepared.items() if self._takes_part(name, which)}
            for name, result in self._compare(which, entered).items():
                results[name][which] = result
            self.worker.call(Release(), SAMPLE_LIMIT_S)
        sound = {name: answer for name, answer in prepared.items() if name in self.ours and not answer.error}
        return ContestResult(
            results,
            {name: answer.errors for name, answer in sound.items()},
            {name: answer.resources for name, answer in sound.items()},
            self.worker.call(CopyBandwidth(), SAMPLE_LIMIT_S),
        )

    def _takes_part(self, name: str, which: str) -> bool:
        return name not in self.ours or set(DIRECTIONS_OF[which]) <= set(self.ours[name])

    def _compare(self, which: str, entered: Mapping[str, Answer]) -> dict[str, Result]:
        from autotune.measure import timing_of

        failed = {name: answer.error for name, answer in entered.items() if answer.error}
        counts: dict[str, int] = {}
        for name in entered:
            if name not in failed:
                warm = self._call(name, which, WarmUp(name, which), PREPARE_LIMIT_S)
                failed |= {name: warm.error} if warm.error else {}
                counts |= {} if warm.error else {name: self._samples_of(name, warm.seconds)}
        self.on_step(f"comparing {which}")
        samples: dict[str, list[float]] = {name: [] for name in counts}
        for name in interleaved(counts):
            if name not in failed:
                answer = self._call(name, which, Sample(name), SAMPLE_LIMIT_S)
                failed |= {name: answer.error} if answer.error else {}
                samples[name].append(answer.sample_us)
        return {
            name: Result(error=failed[name]) if name in failed else Result(timing_of(samples[name])) for name in entered
        }

    def _samples_of(self, name: str, seconds: float) -> int:
        least = OUR_MIN_SAMPLES if name in self.ours else PEER_MIN_SAMPLES
        return max(least, min(MAX_SAMPLES, int(self.seconds_each / max(seconds, 1e-6))))

    def _call(self, name: str, which: str, job: Any, limit_s: float) -> Answer:
        if (name, which) in self.fallen:
            return Answer(error=self.fallen[name, which])
        if not isinstance(job, Sample):
            self.on_step(f"preparing {name} {which}".rstrip())
        try:
            answer = self.worker.call(job, limit_s)
        except WorkerLost as lost:
            raise _Fallen(name, which, f"{lost.state}: {lost.reason}") from None
        if answer.device_lost:
            raise _Fallen(name, which, answer.error)
        return answer


def interleaved(counts: Mapping[str, int]) -> Iterable[str]:
    """Names in the order of sampling: as many rounds as the largest count, each name spread evenly over them."""
    rounds = max(counts.values(), default=0)
    for turn in range(rounds):
        for name, count in counts.items():
            if (turn + 1) * count // rounds > turn * count // rounds:
                yield name
