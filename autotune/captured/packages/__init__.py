"""One file for each package whose models can be captured.

In: a model's inputs. Out: its padded fields and results. Read ``mace``; each file has ``CAPTURABLE``.
"""
