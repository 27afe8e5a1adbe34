"""CUDA text of convolutions whose edge weights tensor cores form in registers.

In: a plan of ``kernelgen.plan.radial``. Out: the text of its kernel. Read kernel.py, then path_group.py and
``include/radial.cuh``.
"""
