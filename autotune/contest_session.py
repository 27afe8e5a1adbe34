"""The worker's side of a contest: contenders on shared tensors, prepared, warmed up and sampled by small jobs.

Jobs (picklable, one contender each, so that whatever goes wrong has a name) enter, :class:`Answer` leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autotune.jobs import build_for, check, device_is_lost, worst_error
from kernelgen.schedule import Schedule

if TYPE_CHECKING:
    import torch

    from autotune.measure import Sampler
    from autotune.workload import Workload

Schedules = Mapping[str, Schedule]
WARM_UP_CALLS = 10


@dataclass(frozen=True)
class ContestSetting:
    """Opened in the worker: tensors and reference that all contenders share."""

    workload: Workload
    device: str
    with_peers: bool = True

    def open(self) -> Callable[[Any], Any]:
        session = ContestSession(self)
        return lambda job: job(session)


@dataclass(frozen=True)
class Answer:
    """Of one job for one contender: an error and nothing else, or what was asked for.

    seconds: of one warm call. sample_us: of one cold call. device_lost: nothing more can run in that process.
    """

    seconds: float = 0.0
    sample_us: float = 0.0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""
    device_lost: bool = False


@dataclass(frozen=True)
class PrepareOurs:
    """Build an operator with these schedules and check their directions."""

    name: str
    schedules: Schedules

    def __call__(self, session: ContestSession) -> Answer:
        return session.attempt(lambda: session.prepare_ours(self.name, self.schedules))


@dataclass(frozen=True)
class PreparePeer:
    """Set up a peer; its own adapter proves that its kernels run and that its numbers are right."""

    name: str

    def __call__(self, session: ContestSession) -> Answer:
        return session.attempt(lambda: session.prepare_peer(self.name))


@dataclass(frozen=True)
class WarmUp:
    """Calls until steady. The first call of a peer is also checked."""

    name: str
    which: str

    def __call__(self, session: ContestSession) -> Answer:
        return session.attempt(lambda: session.warm_up(self.name, self.which))


@dataclass(frozen=True)
class Sample:
    name: str

    def __call__(self, session: ContestSession) -> Answer:
        return session.attempt(lambda: Answer(sample_us=session.samplers[self.name].take(1)[0]))


@dataclass(frozen=True)
class PeerNames:
    def __call__(self, session: ContestSession) -> list[str]:
        return list(session.peers)


@dataclass(frozen=True)
class Release:
    """Between passes: kept graphs of one pass must not crowd out the next."""

    def __call__(self, session: ContestSession) -> None:
        session.release()


@dataclass(frozen=True)
class CopyBandwidth:
    def __call__(self, session: ContestSession) -> float:
        from autotune.measure import copy_bandwidth

        return copy_bandwidth(session.device)


class ContestSession:
    """What the worker holds: tensors, reference, prepared contenders, and a sampler for each in the present pass."""

    def __init__(self, setting: ContestSetting) -> None:
        from autotune.verify import Reference
        from autotune.workload import make_tensors
        from kernelgen.graph import edge_order

        self.workload, self.device = setting.workload, setting.device
        self.tensors = make_tensors(self.workload, self.device)
        self.reference = Reference(self.workload, self.device, self.tensors)
        self.order = None
        if self.tensors.receiver is not None:
            self.order = edge_order(self.tensors.receiver, self.tensors.num_nodes, is_sorted=True)
        self.peers = self._peers() if setting.with_peers else {}
        self.contenders: dict[str, Any] = {}
        self.samplers: dict[str, Sampler] = {}

    def _peers(self) -> dict[str, Any]:
        from autotune.baselines import peers_for

        peers = peers_for(self.workload, self.device, self.tensors, self.reference)
        return {peer.name: peer for peer in peers}

    def attempt(self, job: Callable[[], Answer]) -> Answer:
        """Whatever a contender raises is its entry in the table."""
        try:
            return job()
        except Exception as error:
            lost = device_is_lost(self.device)
            return Answer(error=f"{type(error).__name__}: {error}"[:1000], device_lost=lost)

    def prepare_ours(self, name: str, schedules: Schedules) -> Answer:
        from autotune.baselines import AutogradPasses

        operator = build_for(self.workload, schedules, self.device)
        answer = Answer()
        for direction in schedules:
            errors = check(self.reference, operator, direction, self.tensors, self.order)
            if wrong := worst_error(errors, self.workload.dtype):
                return Answer(error=wrong)
            answer.errors[direction] = errors
            answer.resources[direction] = operator.resources(direction)
        t = self.tensors

        def call(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            if self.workload.operation == "plain":
                return operator(x, y, w)
            return operator(x, y, w, t.sender, t.receiver, num_out=t.num_nodes, order=self.order)

        self.contenders[name] = AutogradPasses(call, t)
        return answer

    def prepare_peer(self, name: str) -> Answer:
        self.contenders[name] = self.peers[name].prepare()
        return Answer()

    def warm_up(self, name: str, which: str) -> Answer:
        from autotune.measure import Sampler

        sampler = Sampler(getattr(self.contenders[name], which.replace("+", "_")), self.device)
        # On a CPU there is nothing that a third call would warm, and a peer's call takes up to a second.
        calls = 2 if sampler.device.type == "cpu" else getattr(self.peers.get(name), "warm_up_calls", WARM_UP_CALLS)
        seconds = sampler.warm_up(calls, 0.1)
        self.samplers[name] = sampler
        return Answer(seconds=seconds)

    def release(self) -> None:
        self.samplers.clear()
        for contender in self.contenders.values():
            contender.release()
