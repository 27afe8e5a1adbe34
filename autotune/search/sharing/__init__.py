"""Several tuners on one study: each claims a schedule before it measures it, and reads the others' records.

In: claims and finished records. Out: the others' records. Read ``claims`` (tuners of one results folder) with
``locks``, then ``optuna_storage`` (tuners of several hosts) with ``storage_access``.
"""
