"""Fair comparison of our schedules and peers: sampled in turn, in one process, on the same tensors.

In: a workload and named schedule sets. Out: a result for every contender and pass. Read ``comparison`` (order of jobs,
how many samples, what the process does), ``precompile`` (what is compiled beside comparisons), ``peers``.
"""
