"""A convolution that forms the weights of its edges itself, from hidden features of a radial network.

In: as for a convolution, with hidden features and a matrix for the weights. Out: the convolution. Read convolution.py,
then tuned.py (its kernels with tuned schedules).
"""
