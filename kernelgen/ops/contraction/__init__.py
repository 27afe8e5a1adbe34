"""Symmetric contractions as a torch function. In: problem, schedules, dtype and device. Out: a differentiable operator.

Read operator.py, then torch_ops.py and elements.py.
"""
