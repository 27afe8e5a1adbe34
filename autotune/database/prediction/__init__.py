"""Schedules for products without an entry, by a small model of time that was fitted to a device's trials.

In: a spec and a graph class. Out: the schedule with the least predicted time among other problems' winners and the
rules' default. Read ``features``, ``trees`` (the model), ``table`` (its file), ``pool`` (the schedules it ranks),
``predicted``, ``first_runs`` (what a first run chose among the likeliest).
"""
