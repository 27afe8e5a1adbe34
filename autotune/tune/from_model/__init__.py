"""Tune what a model runs.

In: a model and a batch, or the misses of earlier runs. Out: database entries, and a table with the model's time before
and after. Read ``recorder`` (what a model runs), ``needs`` (what of it is not tuned, as workloads), ``passes`` and
``before_and_after`` (a whole model's time), ``run`` (all of it), ``opened`` (models named on a command line).
"""
