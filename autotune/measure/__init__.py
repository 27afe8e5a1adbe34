"""Check and time one schedule, in a process that may crash without harm.

In: a workload and a schedule. Out: an outcome as data. Read ``kinds`` (all that is asked of a kind of kernel),
``space`` (what may be tried), ``references`` (exact values to check outputs), ``timing`` (and what disturbs it),
``trial`` and ``worker`` (processes, also one for each device).
"""
