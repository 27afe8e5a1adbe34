"""Search for the fastest schedule: propose schedules and learn from their times.

In: a workload and a direction. Out: trial records and their ranking. Read ``space``, ``probes`` and ``spaces``
(what may be tried), ``samplers``, ``starting_points`` and ``pruning`` (what is tried next), ``ranking``,
``study``, ``loop`` and ``trial_steps``; ``sharing`` lets several tuners work on one study.
"""
