"""Databases of tuned schedules: storage, maintenance, and lookup for a problem on a device.

In: entries, trial records and queries. Out: JSON files, and schedules with their origin. Read ``entry``, ``store``,
``lookup`` (which schedule is loaded), ``candidates`` (entries that may serve), ``prediction`` (where none may),
``edge_vectors``; ``requests`` and ``misses`` (what models asked for), ``quarantine``, ``provenance`` (what a figure
depends on), ``maintenance``, ``trial_records`` and ``trial_archive``.
"""
