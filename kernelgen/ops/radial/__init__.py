"""Convolutions whose weights are a matrix product for each edge, formed for some edges at a time, or in registers.

In: an operator of convolutions, hidden features of the edges, the matrix. Out: a torch function, differentiable twice.
Read parts.py, products.py, fused.py, then convolution.py; transformed.py is for calls that torch transforms.
"""
