"""Has a model's convolutions multiply by the last layers of its radial networks.

In: an accelerated model. Out: the same, whose radial networks end before their last layer. Read folded.py,
take_over.py, then networks.py.
"""
