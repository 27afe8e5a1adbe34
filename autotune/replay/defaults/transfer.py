"""What the schedules of a device's database may cost on another GPU: an estimate from its own trials, by limits alone.

For each study the schedule that the other GPU would get is compared with the fastest trial that is legal there, both
at the times of the device that was measured. So this counts what smaller limits (shared memory, threads, L2) take
away. Another balance of bandwidth, caches and arithmetic it does not see: the true cost is at least as likely higher.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from autotune.database.knobs import within_limits
from autotune.database.lookup import find_schedule
from autotune.database.nearest import Query, why_illegal
from autotune.database.predicted import edges_for_rules, plan_of
from autotune.replay.defaults.choices import Held
from autotune.replay.defaults.evaluate import Estimator
from autotune.replay.defaults.studies import Trials
from kernelgen.device import CUDA_ARCHS, DeviceFacts, representative
from kernelgen.kernels.product.defaults import default_schedule
from kernelgen.kernels.product.schedule import CudaSchedule
from kernelgen.kernels.spec import Spec


def transfers(held: Sequence[Held], estimator: Estimator) -> dict[str, dict[str, float]]:
    """By architecture other than the record's: mean and worst over the fastest trial that is legal there.

    tuned: of an entry's own problem, in its form for that GPU. untuned: of the model's first legal choice for a problem
    that is held out. changed: share of entries that take another form there.
    """
    here = held[0].study.spec.facts
    return {arch: _transfer(held, estimator, representative(arch)) for arch in CUDA_ARCHS if arch != here.arch}


def _transfer(held: Sequence[Held], estimator: Estimator, there: DeviceFacts) -> dict[str, float]:
    tuned: list[float] = []
    untuned: list[float] = []
    changed = 0
    for one in held:
        study, spec = one.study, dataclasses.replace(one.study.spec, facts=there)
        known = [time for schedule, time in study.times_us.items() if plan_of(spec, schedule) is not None]
        if not known:
            continue
        best = min(known) / study.tuned_us
        served = served_there(study, spec)
        changed += served != study.entry.tuned_schedule
        chosen = next((schedule for schedule in one.order if plan_of(spec, schedule) is not None), served)
        for costs, schedule in ((tuned, served), (untuned, chosen)):
            plan = plan_of(study.spec, schedule)
            if plan is not None and isinstance(plan.spec.schedule, CudaSchedule):
                costs.append(estimator.cost(study, plan.spec.schedule).ratio / best)
    found = {"changed": changed / max(1, len(tuned))}
    for name, costs in (("tuned", tuned), ("untuned", untuned)):
        found |= {name: statistics.fmean(costs), f"{name} worst": max(costs)}
    return {name: round(value, 4) for name, value in found.items()}


def served_there(study: Trials, spec: Spec) -> CudaSchedule:
    """An entry's schedule in its form for another GPU (``spec.facts``); the default where it has none."""
    query = Query(spec, find_schedule, study.graph_class)
    entry, _ = within_limits(query, study.entry, study.spec.facts)
    schedule = entry.tuned_schedule
    if why_illegal(query, schedule):
        schedule = default_schedule(spec, edges_for_rules(spec.facts, study.graph_class))
    assert isinstance(schedule, CudaSchedule)
    return schedule
