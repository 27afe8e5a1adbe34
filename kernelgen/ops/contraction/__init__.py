"""Symmetric contractions as a torch function: problem, schedules and device in, a differentiable operator out.

Reading order: operator, torch_ops.
"""
