"""Fair comparison of our schedules and peers: sampled in turn, in one process, on the same tensors.

In: a workload and named schedule sets. Out: a result for every contender and pass. Read ``comparison`` (order of
sampling), ``comparison_worker`` (what the process does), ``precompile`` and ``idle_process`` (preparation), ``peers``.
"""
