"""Stored entries that may serve a query: which, in what order, and how their schedules are adjusted.

In: a query and entries. Out: legal entries, nearest first, and fitted schedules. Read ``query``, ``choice`` (order and
legality), ``other_devices`` (whose entries may serve), ``fitting`` (to another graph or layout), ``legal_form`` (to
another GPU's limits); ``knob_choices`` and ``moving`` carry a schedule to another problem.
"""
