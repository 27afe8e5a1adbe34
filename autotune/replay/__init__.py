"""Samplers judged on recorded spaces, without a device.

In: a space measured whole. Out: how soon each sampler finds its best. Read ``record`` (measures a space), ``recorded``
(reads one back) and ``run``.
"""
