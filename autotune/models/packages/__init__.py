"""What each model package does its own way: one file a package.

In: hyperparameters, a file, or atoms. Out: a model, its inputs, its outputs. Read ``base`` (what a package offers),
then any other; ``registry`` finds them.
"""
