"""Convolutions whose edge weights tensor cores form in registers.

In: a spec. Out: a plan, and the text of its kernel. Read ``plan`` (with the schedules), ``emit`` (the frame), ``group``
and ``include/radial.cuh``; of gradients ``coupled`` with ``coupled.cuh``, and on Hopper ``warpgroup``
with ``warpgroup.cuh``.
"""
