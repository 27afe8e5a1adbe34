"""What makes a product's module take and give what e3nn's does, besides values.

In: a module's problem, weights and state dictionaries. Out: one row of weights; state dictionaries that e3nn reads.
Read ``path_weights`` and ``checkpoints``.
"""
