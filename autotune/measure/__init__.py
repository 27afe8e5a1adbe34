"""Check and time one schedule, in a process that may crash without harm.

In: a workload and a schedule. Out: an outcome as data. Read ``runs`` (how to run a kind of kernel), ``reference``
(exact values to check outputs), ``timing`` with ``intervals``, ``trial``, ``worker`` with ``processes``;
``autograd_passes``, ``equivariance`` and ``devices`` serve comparisons and runs on several devices.
"""
