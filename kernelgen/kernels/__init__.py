"""From a problem to the text of its kernel: for each family its schedule, its plan and its emitter.

In: a problem, a direction, a schedule and the facts of a device, together a spec. Out: a plan, or a ScheduleError that
names the broken limit; and the plan's source with one ``extern "C"`` function. Read ``spec`` and ``knobs`` (how work is
divided, as data), ``dispatch`` (which planner, which emitter), ``source``, then a family: ``spherical_harmonics``
and ``symmetric_contraction`` (a file each), ``product``, ``pairs``, ``radial``. Hand-written headers are in
``include``.
"""
