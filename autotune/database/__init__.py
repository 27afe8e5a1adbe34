"""Tuned records: how they are stored, kept sound, and which one is loaded for a problem on a device.

In: entries, trial records and questions. Out: JSON files and schedules with their origin. Read ``entry``, ``store``,
``lookup`` (the order of the search), ``edge_vectors``; ``quarantine``, ``provenance`` (what a figure depends on),
``maintenance``, ``trial_records`` and ``trial_archive``.
"""
