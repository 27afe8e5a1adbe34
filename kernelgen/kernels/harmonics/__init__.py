"""Spherical harmonics, by themselves and inside products.

In: a spec. Out: a plan, and the text of its kernel. Read ``schedule``, ``plan``, ``emit``.
"""
