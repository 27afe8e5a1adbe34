"""Symmetric contractions as C++ text. In: a plan. Out: the lines of a GPU's or of a host's kernel, without the head.

Read parts.py, then gpu.py and host.py.
"""
