"""``equitune bench``: compare all workloads of a config with all peers; and whole models as their packages run them.

In: a config and a device, or models and structures. Out: rows of ``results/bench`` and ``results/models``, and tables.
Read ``kernels`` with ``rows``; of models ``whole_models`` (the loop), ``contenders`` (who takes part), ``session``
(what a contender's process does), ``model_rows`` and ``largest`` (the largest crystal that fits).
"""
