"""``equitune bench``: compare all workloads of a config with all peers; and whole models as their packages run them.

In: a config and a device, or models and structures. Out: rows of ``results/bench`` and ``results/models``, and tables.
Read ``kernels`` with ``rows``; of models ``whole_models`` (the loops: steps, and the largest crystal that fits),
``contenders`` (who takes part), ``session`` (what a contender's process does) and ``model_rows``.
"""
