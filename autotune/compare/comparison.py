"""Compare our schedules and peers fairly: measured in turn, in one fresh process, on the same tensors.

A workload, named schedule sets and the passes to time give a :class:`Result` for every contender and pass. Every
contender is checked against float64 e3nn, warmed up, and sampled round-robin, so that clock drift and other load on the
machine affect all alike. A contender that fails gets an error instead of a time. If one crashes the process, its result
says so, and the comparison is repeated without it.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from autotune.database.entry import what_is_wrong
from autotune.errors import PeerError
from autotune.measure.kinds import new_graph, order_ms
from autotune.measure.trial import WorkloadSession, device_is_lost, free_memory, is_out_of_memory
from autotune.measure.worker import Worker, WorkerLost
from autotune.text import NOT_COMPARED, time_text
from autotune.workload.workload import Workload, moved_bytes
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    from autotune.compare.peers.peer import Peer
    from autotune.measure.kinds import GraphOrder
    from autotune.measure.timing import Sampler, Timing

# Rows of calls to measure the host's time; fewer for a host that needs longer, or this many times the least.
HOST_ROWS, HOST_ROWS_OF_SLOW, SLOW_HOST_US, SLOW_HOST_RATIO = 12, 3, 1000.0, 3.0
PREPARE_LIMIT_S = 600.0
LEFT_OUT = f"{NOT_COMPARED}: {{}}; a longer --budget, or --peers, includes it"
SAMPLE_LIMIT_S = 120.0
# A pass of e3nn takes about so many times the one before it: double backward after backward, backward after forward.
PASS_RATIO = 3.0
Given = ParamSpec("Given")
Schedules = Mapping[str, Knobs]


@dataclass(frozen=True)
class Result:
    """Result of one contender in one pass: a timing, or why there is none.

    memory_bytes: peak memory of one call, beyond what was allocated before; host_us: time until a call returns, on a
    small graph; None if not measured on this device. joules_each: of one of many calls in a row, by round; empty if
    they were not asked for or not counted.
    """

    timing: Timing | None = None
    error: str = ""
    memory_bytes: int | None = None
    host_us: float | None = None
    joules_each: tuple[float, ...] = ()

    @property
    def joules(self) -> float | None:
        return statistics.median(self.joules_each) if self.joules_each else None

    @property
    def figures(self) -> dict[str, float]:
        """What was measured of a call, by the keys of :data:`autotune.workload.objective.FIGURES`."""
        time_us = None if self.timing is None else self.timing.time_us
        joules = None if self.joules is None else float(f"{self.joules:.4g}")
        found = {"time_us": time_us, "joules": joules, "memory_bytes": self.memory_bytes}
        return {key: value for key, value in found.items() if value is not None}

    def samples(self, figure: str) -> tuple[float, ...]:
        """Of ``time`` or ``energy``, by round."""
        return self.joules_each if figure == "energy" else () if self.timing is None else self.timing.samples_us

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.error} if self.timing is None else self.timing.to_dict()

    def summary(self) -> dict[str, Any]:
        """The result without raw samples, as database entries store it."""
        data = self.to_dict()
        data.pop("samples_us", None)
        return data


@dataclass(frozen=True)
class ComparisonResult:
    """results: contender -> pass -> result. errors, resources and certificates (ours only): by contender, direction.

    copies: time of a copy that moves the compulsory bytes of a pass, in microseconds, if requested. order_ms: of
    ordering a new graph, by contender, if requested. seconds: what the parts of the comparison took.
    """

    results: dict[str, dict[str, Result]]
    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    resources: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    certificates: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    copy_bandwidth: float = 0.0
    copies: dict[str, float] = field(default_factory=dict)
    order_ms: dict[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


def run_comparison(
    setting: ComparisonSetting,
    passes: tuple[str, ...],
    ours: Mapping[str, Schedules],
    *,
    seconds_each: float = 2.0,
    on_step: Callable[[str], None] = lambda text: None,
    worker: Worker | None = None,
    known_failures: Mapping[str, str] = MappingProxyType({}),
    copies: bool = False,
    deadline: float | None = None,
    optional: Collection[str] = (),
    asked: bool = False,
    energy: int = 0,
) -> ComparisonResult:
    """Compare in ``passes``. A schedule set takes part in the passes for whose directions it has schedules.

    seconds_each: approximate sampling time of a contender in a pass. worker: a process to reuse, so that consecutive
    comparisons share what was built; by default a new one. known_failures: contenders to skip, with the reason. copies:
    whether to time copies of as many bytes, and the ordering of a new graph. deadline: a moment of ``time.monotonic``.
    Passes share the time until then. Peers for which it is too short are left out, with that as their error, those that
    compile longest first; of ours the fewest samples are taken in any case. optional: of ours, those that are left out
    too if it is too short. asked: no peer is left out. energy: rounds in which the joules of a call are measured too,
    about a second a contender (two, if it is one round); the peers take part in the first. Later rounds end with the
    pass's time.
    """
    with Worker(setting) if worker is None else nullcontext(worker) as process:
        comparison = _Comparison(
            process, setting, passes, ours, seconds_each, on_step, copies, deadline, optional, asked, energy
        )
        comparison.fallen |= {(name, ""): reason for name, reason in known_failures.items()}
        while True:
            process.reopen(setting)
            try:
                return comparison.hold()
            except _Fallen as end:
                process.close()
                comparison.fallen[end.name, end.which] = end.reason


class _Fallen(Exception):
    """A contender crashed the process or its device; ``which`` is the pass, or empty during preparation."""

    def __init__(self, name: str, which: str, reason: str) -> None:
        super().__init__(f"{name} {which}: {reason}")
        self.name, self.which, self.reason = name, which, reason


@dataclass
class _Comparison:
    worker: Worker
    setting: ComparisonSetting
    passes: tuple[str, ...]
    ours: Mapping[str, Schedules]
    seconds_each: float
    on_step: Callable[[str], None]
    times_copies: bool = False
    deadline: float | None = None
    optional: Collection[str] = ()
    asked: bool = False
    energy: int = 0
    # Those that were not left out: they stay, whatever another one's crash takes.
    entered: set[str] = field(default_factory=set)
    fallen: dict[tuple[str, str], str] = field(default_factory=dict)
    # By pass and contender. Results from before a crash are kept, and need not be measured again.
    compared: dict[str, dict[str, Result]] = field(default_factory=dict)
    copies: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    # By part of the comparison: setting up, preparing each contender, then by pass.
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def hold(self) -> ComparisonResult:
        with self._timed("set up"):
            build_s = self.worker.ask(PREPARE_LIMIT_S, ComparisonSession.build_seconds)
        prepared: dict[str, Answer] = {}
        for name in [*self.ours, *sorted(build_s, key=build_s.__getitem__)]:
            others = sum(not answer.error for answer in prepared.values())
            prepared[name] = self._prepare(name, build_s.get(name, 0.0), others)
        for name, answer in prepared.items():
            self._note_errors(name, answer)
        for which in self.passes:
            if which not in self.compared:
                needed = set(self.setting.workload.kind.passes[which])
                entered = [name for name in prepared if name not in self.ours or needed <= set(self.ours[name])]
                self.compared[which] = self._compare(which, {name: prepared[name] for name in entered})
                with self._timed(f"release {which}"):
                    self.worker.ask(SAMPLE_LIMIT_S, ComparisonSession.release)
                if self.times_copies:
                    with self._timed("copy"):
                        moved = moved_bytes(self.setting.workload, which)
                        copied = self.worker.ask(SAMPLE_LIMIT_S, ComparisonSession.copy_time, moved)
                    self.copies |= {} if copied is None else {which: copied}
        orders: dict[str, float] = {}
        if self.times_copies:
            with self._timed("order"):
                for name in (name for name, answer in prepared.items() if not answer.error):
                    time_ms = self.worker.ask(SAMPLE_LIMIT_S, ComparisonSession.order_time, name)
                    orders |= {} if time_ms is None else {name: time_ms}
        with self._timed("bandwidth"):
            bandwidth = self.worker.ask(SAMPLE_LIMIT_S, ComparisonSession.copy_bandwidth)
        return ComparisonResult(
            {
                name: {which: self.compared[which][name] for which in self.passes if name in self.compared[which]}
                for name in prepared
            },
            self.errors,
            {name: prepared[name].resources for name in self.ours if not prepared[name].error},
            {name: prepared[name].certificates for name in self.ours if not prepared[name].error},
            bandwidth,
            self.copies,
            orders,
            dict(self.seconds),
        )

    def _prepare(self, name: str, build_s: float, others: int) -> Answer:
        # What the first of ours took to prepare, each that is ready takes again for its passes, and this one for all.
        needed_s = build_s + (others + 1) * self.seconds.get(f"prepare {next(iter(self.ours))}", 0.0)
        with self._timed(f"prepare {name}"):
            if name not in self.entered and self._is_late(name, needed_s, self.deadline):
                why = f"it takes up to {build_s:.0f} s to compile" if build_s else "the time for comparisons was over"
                return Answer(error=LEFT_OUT.format(why))
            self.entered.add(name)
            if name in self.ours:
                return self._ask(name, "", PREPARE_LIMIT_S, ComparisonSession.prepare_ours, self.ours[name])
            return self._ask(name, "", PREPARE_LIMIT_S, ComparisonSession.prepare_peer)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin = monotonic()
        try:
            yield
        finally:
            self.seconds[part] += monotonic() - begin

    def _note_errors(self, name: str, answer: Answer) -> None:
        """Keep the largest relative error of every checked output."""
        for direction, errors in answer.errors.items():
            known = self.errors.setdefault(name, {}).setdefault(direction, {})
            known |= {slot: max(error, known.get(slot, 0.0)) for slot, error in errors.items()}

    def _is_late(self, name: str, needed_s: float, end: float | None) -> bool:
        """Whether one that may be left out, and needs so many seconds, would go on after ``end``."""
        spared = name not in self.optional if name in self.ours else self.asked
        return not spared and end is not None and monotonic() + needed_s >= end

    def _compare(self, which: str, entered: Mapping[str, Answer]) -> dict[str, Result]:
        from autotune.measure.timing import timing_of

        failed = {name: answer.error for name, answer in entered.items() if answer.error}
        warm: dict[str, Answer] = {}
        samples: dict[str, list[float]] = {name: [] for name in entered}
        counts: dict[str, int] = {}
        fewest: dict[str, int] = {}
        conditions: dict[str, Answer] = {}
        joules: dict[str, tuple[float, ...]] = {}
        end = None
        if self.deadline is not None:  # passes that are left share the time equally
            now = monotonic()
            end = now + max(0.0, self.deadline - now) / (len(self.passes) - self.passes.index(which))

        def sample(names: Iterable[str]) -> None:
            for name in names:
                is_over = end is not None and monotonic() >= end and len(samples[name]) >= fewest[name]
                if name not in failed and not is_over:
                    answer = self._ask(name, which, SAMPLE_LIMIT_S, ComparisonSession.sample)
                    failed.update({name: answer.error} if answer.error else {})
                    samples[name].append(answer.sample_us)

        for name in [name for name in entered if name not in failed]:
            sampling_s = sum(fewest[other] * warm[other].seconds for other in counts)
            # What its warm-up takes, as far as earlier parts of the comparison tell.
            warm_up_s = PASS_RATIO * max(self.seconds.get(f"warm up {name} {other}", 0.0) for other in self.passes)
            warm_up_s = max(self.seconds[f"prepare {name}"], warm_up_s)
            if name not in self.ours and self._is_late(name, sampling_s + warm_up_s, end):
                failed[name] = LEFT_OUT.format("the time for comparisons was over")
                continue
            with self._timed(f"warm up {name} {which}"):
                warm[name] = answer = self._ask(name, which, PREPARE_LIMIT_S, ComparisonSession.warm_up, which)
            failed |= {name: answer.error} if answer.error else {}
            self._note_errors(name, answer)
            least_s = min((warm[other].seconds for other in warm if other not in failed), default=0.0)
            count = samples_of(answer.seconds, self.seconds_each, name in self.ours, least_s)
            fewest[name] = min(count, samples_of(answer.seconds, 0.0, name in self.ours))
            needed_s = sampling_s + fewest[name] * answer.seconds
            if name not in {*failed, *self.ours} and self._is_late(name, needed_s, end):
                failed[name] = LEFT_OUT.format(f"a call takes {time_text(1e6 * answer.seconds)}")
            if self.setting.device.startswith("cuda") and name not in self.ours and answer.seconds > SLOW_CALL_S:
                with self._timed(f"sample slow {name} {which}"):
                    sample([name] * count)
                    conditions[name] = self._ask(name, which, SAMPLE_LIMIT_S, ComparisonSession.conditions)
                    joules |= self._joules(which, [] if name in failed else [name], end)
                    self.worker.ask(SAMPLE_LIMIT_S, ComparisonSession.release, name)
            else:
                counts |= {} if name in failed else {name: count}
        self.on_step(f"comparing {which}")
        with self._timed(f"sample {which}"):
            take_in_rounds(counts, samples, self.ours, sample)
        for name in [name for name in counts if name not in failed]:
            conditions[name] = self._ask(name, which, SAMPLE_LIMIT_S, ComparisonSession.conditions)
        joules |= self._joules(which, [name for name in counts if name not in failed], end)
        with self._timed(f"host {which}"):
            host_us = self._host_times(which, {name: warm[name] for name in warm if name not in failed})
        return {
            name: Result(error=failed[name])
            if name in failed
            else Result(
                timing_of(samples[name], conditions=conditions[name].conditions),
                memory_bytes=warm[name].memory_bytes,
                host_us=host_us.get(name),
                joules_each=joules.get(name, ()),
            )
            for name in entered
        }

    def _joules(self, which: str, names: Iterable[str], end: float | None) -> dict[str, tuple[float, ...]]:
        """By contender and round, taken in turn like samples."""
        from autotune.measure.timing import ENERGY_ROUND_S, ENERGY_S

        found: dict[str, tuple[float, ...]] = {name: () for name in names} if self.energy else {}
        seconds = ENERGY_S if self.energy == 1 else ENERGY_ROUND_S
        with self._timed(f"energy {which}"):
            for turn in range(self.energy):
                for name in found if turn == 0 else [name for name in found if name in self.ours and found[name]]:
                    if turn and end is not None and monotonic() >= end:
                        break
                    joules = self._ask(name, which, SAMPLE_LIMIT_S, ComparisonSession.energy, seconds).joules
                    found[name] += () if joules is None else (joules,)
        return found

    def _host_times(self, which: str, warm: Mapping[str, Answer]) -> dict[str, float]:
        """The least of several rows of calls, taken in turn like samples; fewer rows for a slow host."""
        least = {name: answer.host_us for name, answer in warm.items() if answer.host_us is not None}
        for turn in range(HOST_ROWS):
            limit = min(SLOW_HOST_US, SLOW_HOST_RATIO * min(least.values(), default=0.0))
            for name in least:
                if turn < HOST_ROWS_OF_SLOW or least[name] < limit:
                    seconds = warm[name].seconds
                    answer = self._ask(name, which, SAMPLE_LIMIT_S, ComparisonSession.host_row, seconds)
                    least[name] = min(least[name], answer.host_us or least[name])
        return least

    def _ask(
        self,
        name: str,
        which: str,
        limit_s: float,
        method: Callable[Concatenate[ComparisonSession, str, Given], Answer],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Answer:
        """What a method answers about a contender; ``which``: the pass, or empty during preparation."""
        if (name, which) in self.fallen:
            return Answer(error=self.fallen[name, which])
        if limit_s > SAMPLE_LIMIT_S:
            self.on_step(f"preparing {name} {which}".rstrip())
        try:
            answer = self.worker.ask(limit_s, method, name, *given, **named)
        except WorkerLost as lost:
            raise _Fallen(name, which, f"{lost.state}: {lost.reason}") from None
        if answer.device_lost:
            raise _Fallen(name, which, answer.error)
        return answer


# How many samples each contender of a comparison gets, and in which order.

OUR_MIN_SAMPLES = 10
PEER_MIN_SAMPLES = 6  # the fewest that give a 95% interval
# A peer whose call takes longer needs fewer samples. On a GPU it is also sampled alone and then released, because what
# e3nn keeps for a large graph leaves no room for the others.
SLOW_CALL_S, SLOW_MIN_SAMPLES = 0.05, 3
MAX_SAMPLES = 60
# After so many samples each, whoever takes so many times the least median is not sampled further: a ratio that is far
# from one needs few samples. Three say nothing of our own schedules, whose samples are compared in pairs.
ROUNDS = ((3, 5.0), (10, 3.0), (20, 1.5))


def samples_of(seconds: float, seconds_each: float, ours: bool, least_s: float = 0.0) -> int:
    """Samples of a contender whose warm call takes ``seconds``. least_s: of the fastest contender so far."""
    least = OUR_MIN_SAMPLES
    if not ours:
        least = SLOW_MIN_SAMPLES if seconds > SLOW_CALL_S else PEER_MIN_SAMPLES
        if seconds > SLOW_CALL_S and least_s and seconds > ROUNDS[0][1] * least_s:
            return least
    return max(least, min(MAX_SAMPLES, int(seconds_each / max(seconds, 1e-6))))


def take_in_rounds(
    counts: Mapping[str, int],
    samples: Mapping[str, list[float]],
    ours: Collection[str],
    sample: Callable[[Iterable[str]], None],
) -> None:
    """Take up to ``counts`` samples of each contender by ``sample``, which adds to ``samples``; fewer of slow ones.

    Contenders are sampled in turn, so sample i of all that have one is from the same time.
    """
    going, taken = dict(counts), 0
    for upto, ratio in (*ROUNDS, (MAX_SAMPLES, 1.0)):
        sample(interleaved({name: min(count, upto) - min(count, taken) for name, count in going.items()}))
        taken = upto
        medians = {name: statistics.median(samples[name]) for name in going if samples[name]}
        limit = ratio * min(medians.values(), default=0.0)
        spared = ours if upto < OUR_MIN_SAMPLES else ()
        going = {name: going[name] for name in medians if medians[name] <= limit or name in spared}


def interleaved(counts: Mapping[str, int]) -> Iterable[str]:
    """Names in sampling order: as many rounds as the largest count, with each name spread evenly over them.

    Every second round is in the opposite order, so that nobody always comes after the same one.
    """
    rounds = max(counts.values(), default=0)
    for turn in range(rounds):
        for name, count in list(counts.items())[:: -1 if turn % 2 else 1]:
            if (turn + 1) * count // rounds > turn * count // rounds:
                yield name


# The worker's side: its session prepares, warms up and samples contenders on shared tensors.
#
# A method that concerns a contender returns an :class:`Answer`, a failure too, so that every failure can be attributed.

WARM_UP_CALLS = 10
# Minimum seconds of warm-up calls: peers choose kernels and fill caches meanwhile, ours are ready.
WARM_UP_S, OUR_WARM_UP_S = 0.05, 0.02
# Warm-up ends after this time, however few calls were made.
WARM_UP_LIMIT_S = 1.5


@dataclass(frozen=True)
class ComparisonSetting:
    """Opened in the worker: tensors and reference shared by all contenders. ``peers``: by name, None for all."""

    workload: Workload
    device: str
    peers: tuple[str, ...] | None = None

    def open(self) -> ComparisonSession:
        free_memory(self.device)
        return ComparisonSession(self)


@dataclass(frozen=True)
class Answer:
    """Answer about one contender: an error alone, or the requested values.

    seconds: time of one warm call. sample_us: of one cold call. memory_bytes: peak memory of one call (GPU only).
    host_us: until a call returns (GPU and small graphs only). joules: of one of many calls in a row.
    certificates: of our kernels, by direction, see :meth:`autotune.measure.trial.WorkloadSession.check`. conditions:
    of the machine while it was sampled. device_lost: nothing more can run in that process.
    """

    seconds: float = 0.0
    sample_us: float = 0.0
    memory_bytes: int | None = None
    host_us: float | None = None
    joules: float | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    certificates: dict[str, dict[str, Any]] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    device_lost: bool = False


def of_contender(
    method: Callable[Concatenate[ComparisonSession, str, Given], Answer],
) -> Callable[Concatenate[ComparisonSession, str, Given], Answer]:
    """A method about one contender, whose exception becomes its error; the memory that it took is freed."""

    @functools.wraps(method)
    def answer(session: ComparisonSession, name: str, /, *given: Given.args, **named: Given.kwargs) -> Answer:
        try:
            return method(session, name, *given, **named)
        except Exception as error:
            lost = device_is_lost(session.device)
            failed = Answer(error=f"{type(error).__name__}: {error}"[:1000], device_lost=lost)
        if not lost:
            session.release(name)
        return failed

    return answer


def _unless_out_of_memory(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise


class ComparisonSession(WorkloadSession):
    """State of the worker: tensors, reference, prepared contenders, and a sampler for each in the present pass."""

    def __init__(self, setting: ComparisonSetting) -> None:
        super().__init__(setting.workload, setting.device)
        self.peers: dict[str, Peer] = {}
        if setting.peers != ():
            from autotune.compare.peers import peers_for

            peers = peers_for(self.workload, self.device, self.tensors, self.reference)
            self.peers = {peer.name: peer for peer in peers if setting.peers is None or peer.name in setting.peers}
        self.contenders: dict[str, Any] = {}
        # What each does once for a new graph.
        self.orders: dict[str, GraphOrder | None] = {}
        self.samplers: dict[str, Sampler] = {}

    def build_seconds(self) -> dict[str, float]:
        """By peer that takes part, the most seconds that it takes to compile itself."""
        return {name: peer.adapter.build_s for name, peer in self.peers.items()}

    @of_contender
    def prepare_ours(self, name: str, schedules: Schedules) -> Answer:
        """Build an operator with these schedules and check their directions."""
        from autotune.compare.peers.peer import CheckedPasses, Product, Task

        operator = self.build(schedules)
        answer = Answer()
        for direction in schedules:
            errors, certificate = self.check(operator, direction, certifies=True)
            if wrong := what_is_wrong(errors, self.workload.tolerance, certificate):
                return Answer(error=wrong)
            answer.errors[direction], answer.certificates[direction] = errors, certificate
            answer.resources[direction] = operator.resources(direction)
        task = Task(self.workload, self.reference.device, self.tensors, self.reference)
        call = self.kind.call(self.workload, operator, self.tensors, self.order)
        self.orders[name] = new_graph(operator, self.tensors.num_nodes)
        self.contenders[name] = CheckedPasses(name, Product(call, self.workload.layout), task, self.workload.tolerance)
        return answer

    @of_contender
    def prepare_peer(self, name: str) -> Answer:
        """Set up a peer; its adapter checks that its kernels run and its results are right."""
        self.contenders[name], self.orders[name] = self.peers[name].prepare(), self.peers[name].adapter.order
        return Answer()

    @of_contender
    def warm_up(self, name: str, which: str) -> Answer:
        """Call until timings are steady. A peer's first call is also checked."""
        from autotune.measure.timing import Sampler

        ours = name not in self.peers
        sampler = Sampler(getattr(self.contenders[name], which.replace("+", "_")), self.device)
        # On a CPU a third call warms nothing more, and a peer's call takes up to a second.
        calls = 2 if sampler.device.type == "cpu" else WARM_UP_CALLS if ours else self.peers[name].adapter.warm_up_calls
        seconds = sampler.warm_up(calls, OUR_WARM_UP_S if ours else WARM_UP_S, max_seconds=WARM_UP_LIMIT_S)
        self.samplers[name] = sampler
        # On small graphs the host's time may dominate, so it is measured too, but only beside peers.
        by_host = sampler.device.type == "cuda" and self.is_small and self.peers
        answer = Answer(
            seconds=seconds,
            memory_bytes=sampler.peak_bytes(),
            host_us=sampler.host_row_us(seconds) if by_host else None,
            errors=getattr(self.contenders[name], "errors", {}),
        )
        sampler.conditions()  # from here on
        return answer

    @of_contender
    def sample(self, name: str) -> Answer:
        """Time a cold call. PeerError if a peer's time would be its host's: ratios would not be of its kernels."""
        sampler = self.samplers[name]
        sample_us = sampler.take(1)[0]
        if sampler.late and name in self.peers:
            raise PeerError(
                f"its host launches one call too slowly for a device time: {sample_us:.0f} us from the first launch to "
                "the end, with pauses of the device"
            )
        return Answer(sample_us=sample_us)

    @of_contender
    def conditions(self, name: str) -> Answer:
        """What the machine did since the contender was warmed up."""
        return Answer(conditions=self.samplers[name].conditions().to_dict())

    @of_contender
    def energy(self, name: str, seconds: float) -> Answer:
        """Joules of the GPU for one of many calls in a row, with warm caches; None where it is not counted."""
        from autotune.measure.timing import joules_a_call

        return Answer(joules=joules_a_call(self.samplers[name].call, self.device, seconds))

    @of_contender
    def host_row(self, name: str, seconds: float) -> Answer:
        """The host's time per call from one row of calls; ``seconds``: time of one warm call."""
        return Answer(host_us=self.samplers[name].host_row_us(seconds))

    def order_time(self, name: str) -> float | None:
        """Milliseconds of what a contender does once for a new graph; None for what has no edges to order."""
        sender, receiver = self.tensors.sender, self.tensors.receiver
        if sender is None or receiver is None or name not in self.contenders:
            return None
        return _unless_out_of_memory(lambda: order_ms(self.orders[name], sender, receiver))

    def copy_time(self, moved: int) -> float | None:
        """Microseconds of a copy of as many bytes; None if memory does not suffice."""
        from autotune.measure.timing import copy_us

        return _unless_out_of_memory(lambda: copy_us(self.device, moved))

    def copy_bandwidth(self) -> float:
        from autotune.measure.timing import copy_bandwidth

        return copy_bandwidth(self.device)

    def release(self, name: str | None = None) -> None:
        """Release memory that contenders keep for a pass, to leave room for the others; ``name``: only this one's."""
        for chosen in list(self.contenders) if name is None else [name]:
            self.samplers.pop(chosen, None)
            if chosen in self.contenders:
                self.contenders[chosen].release()
        free_memory(self.device)
