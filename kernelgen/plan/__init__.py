"""Decides which schedules are legal and how a kernel divides its work.

In: a spec. Out: a plan, which emitters trust, or a ScheduleError that names the broken limit. Read ``planner``
(:func:`~kernelgen.plan.planner.make_plan` decides legality), ``channelwise`` with ``path_groups`` and ``l2_prefetch``,
``pairs``, ``spherical_harmonics``; ``defaults`` has the schedules of untuned kernels.
"""
