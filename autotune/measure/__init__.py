"""Time and correctness of one schedule, in a process that may crash without harm.

In: a workload and a schedule. Out: an outcome as data. Read ``runs`` (how a kind of kernel is run), ``reference`` (the
values that outputs are held to), ``timing`` with ``intervals``, ``trial``, ``worker`` with ``processes``;
``autograd_passes``, ``equivariance`` and ``devices`` serve comparisons and runs on several devices.
"""
