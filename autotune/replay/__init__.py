"""Compare samplers on recorded spaces, without a device: how soon does each find the best schedule?

In: a config. Out: a completely measured space, and the trials that each sampler needs on it. Read ``record`` (measures
a space), ``recorded`` (reads one back) and ``run``.
"""
