"""CUDA text of convolutions whose edge weights tensor cores form in registers.

In: a plan of ``kernelgen.plan.radial_convolution``. Out: the text of its kernel. Read kernel.py, then edge_loop.py,
path_group.py, fragments.py and ``include/radial.cuh``; of values also normalized.py, ``matrix_at_once.cuh`` and
``whole_rows.cuh``, of gradients coupled_stage.py, coupled.py, single_terms.py and ``coupled.cuh``, and on Hopper
warpgroup_calls.py, warpgroup.py (of gradients), warpgroup_values.py and ``warpgroup.cuh``.
"""
