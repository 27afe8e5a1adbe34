"""Search for the fastest schedule: propose schedules and learn from their times.

In: a workload and a direction. Out: trial records and their ranking. Read ``samplers`` and ``starting_points`` (what is
tried next), ``study``, ``loop``; ``shared`` lets several tuners work on one study.
"""
