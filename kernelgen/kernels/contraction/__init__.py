"""Symmetric contractions.

In: a spec. Out: a plan, and the text of its kernel. Read ``schedule`` (with the spec), ``plan``, ``emit``.
"""
