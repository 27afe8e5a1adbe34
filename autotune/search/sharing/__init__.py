"""Several tuners on one study: each claims a schedule before it measures it, and learns what the others found.

In: claims and finished records. Out: the records of others. Read ``claims`` (tuners of one results folder) with
``locks``, then ``optuna_storage`` (tuners of several hosts) with ``storage_access``.
"""
