"""Tensor products whose paths keep each channel by itself, and what all tensor products have in common.

In: a spec. Out: a plan, and the text of its kernel. Read ``schedule`` (the knobs), ``plan`` (which are legal,
and the defaults), ``channelwise`` (how the work is divided), ``emit`` (the frame of a GPU's kernel, and the kernel of a
CPU), ``group`` (the function of a group of paths), ``memory`` (loads and stores).
"""
