"""Worker side of a comparison: its session prepares, warms up and samples contenders on shared tensors.

A method that concerns a contender returns an :class:`Answer`, a failure too, so that every failure can be attributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from autotune.database.entry import what_is_wrong
from autotune.errors import PeerError
from autotune.measure.operations import new_graph, order_ms
from autotune.measure.trial import WorkloadSession, device_is_lost, free_memory, is_out_of_memory
from kernelgen.kernels.knobs import Knobs

if TYPE_CHECKING:
    from autotune.measure.operations import GraphOrder
    from autotune.measure.timing import Sampler
    from autotune.workload.workload import Workload

Schedules = Mapping[str, Knobs]
Given = ParamSpec("Given")
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
    host_us: until a call returns (GPU and small graphs only). certificates: of our kernels, by direction, see
    :func:`autotune.measure.trial.certify`. device_lost: nothing more can run in that process.
    """

    seconds: float = 0.0
    sample_us: float = 0.0
    memory_bytes: int | None = None
    host_us: float | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    certificates: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    device_lost: bool = False


def of_contender(
    method: Callable[Concatenate[ComparisonSession, str, Given], Answer],
) -> Callable[Concatenate[ComparisonSession, str, Given], Answer]:
    """A method about one contender, whose exception becomes its error; the memory that it took is freed."""

    @functools.wraps(method)
    def answer(session: ComparisonSession, name: str, *given: Given.args, **named: Given.kwargs) -> Answer:
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
        self.peers = self._peers(setting.peers)
        self.contenders: dict[str, Any] = {}
        # What each does once for a new graph.
        self.orders: dict[str, GraphOrder | None] = {}
        self.samplers: dict[str, Sampler] = {}

    def _peers(self, names: tuple[str, ...] | None) -> dict[str, Any]:
        if names == ():
            return {}
        from autotune.compare.peers import peers_for

        peers = peers_for(self.workload, self.device, self.tensors, self.reference)
        return {peer.name: peer for peer in peers if names is None or peer.name in names}

    def build_seconds(self) -> dict[str, float]:
        """By peer that takes part, the most seconds that it takes to compile itself."""
        return {name: peer.build_s for name, peer in self.peers.items()}

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
        self.contenders[name], self.orders[name] = self.peers[name].prepare(), self.peers[name].order
        return Answer()

    @of_contender
    def warm_up(self, name: str, which: str) -> Answer:
        """Call until timings are steady. A peer's first call is also checked."""
        from autotune.measure.timing import Sampler

        ours = name not in self.peers
        sampler = Sampler(getattr(self.contenders[name], which.replace("+", "_")), self.device)
        # On a CPU a third call warms nothing more, and a peer's call takes up to a second.
        calls = 2 if sampler.device.type == "cpu" else getattr(self.peers.get(name), "warm_up_calls", WARM_UP_CALLS)
        seconds = sampler.warm_up(calls, OUR_WARM_UP_S if ours else WARM_UP_S, max_seconds=WARM_UP_LIMIT_S)
        self.samplers[name] = sampler
        # On small graphs the host's time may dominate, so it is measured too, but only beside peers.
        by_host = sampler.device.type == "cuda" and self.is_small and self.peers
        return Answer(
            seconds=seconds,
            memory_bytes=sampler.peak_bytes(),
            host_us=sampler.host_row_us(seconds) if by_host else None,
            errors=getattr(self.contenders[name], "errors", {}),
        )

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
