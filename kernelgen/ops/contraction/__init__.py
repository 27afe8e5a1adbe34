"""Symmetric contractions as a torch function. In: problem, schedules, dtype and device. Out: a differentiable operator.

Read operator.py, autograd.py (eager calls), then torch_ops.py and elements.py (which nodes are of which element).
"""
