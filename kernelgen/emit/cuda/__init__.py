"""CUDA text of channelwise products: a warp or a part of one loops over edges, its lanes take the channels.

In: a plan of ``kernelgen.plan.channelwise``. Out: the text of its kernel. Read ``kernel`` (the frame), ``path_group``
(the function of a group of paths), ``edge_loop``, ``edge_operand``, ``memory_access``, ``weight_ring``;
``two_part_kernel`` puts two kernels into one launch, ``zero_blocks`` has the kernel zero its own outputs.
"""
