"""Fair comparison of our schedules and peers: sampled in turn, in one process, on the same tensors.

In: a workload and named schedule sets. Out: a result for every contender and pass. Read ``comparison`` (order of jobs),
``sampling`` (how many samples), ``comparison_worker`` (what the process does), ``ahead`` and ``precompile`` (what is
compiled beside comparisons), ``torch_cache``, ``idle_process`` (a process that waits for its comparison), ``peers``.
"""
