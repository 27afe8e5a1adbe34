"""Tuned entries: stored, looked up, kept in order; and what is chosen where there is none.

In: a problem on a device. Out: a schedule with its origin. Read ``entry`` and ``store``, ``lookup`` with ``nearest``
(which entries may serve, and a device's knobs), ``predicted`` with ``model_of_time``, ``trials`` (records and faults),
``misses`` (what models asked for in vain), ``maintenance`` (stale entries, merging, provenance,
databases shared by many machines).
"""
