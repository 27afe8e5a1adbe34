"""A fair comparison: schedules of ours and peers in turn, in one process, on the same tensors.

In: a workload and named schedule sets. Out: a result for every contender and pass. Read ``comparison`` (who is sampled
when), ``comparison_worker`` (what the process does), ``precompile`` and ``idle_process`` (what is done beforehand),
``peers``.
"""
