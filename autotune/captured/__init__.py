"""One step of energies and forces as one launch: a CUDA graph of a whole model on padded inputs.

In: a model of MACE, NequIP or SevenNet. Out: a module that takes and gives what the model does. Read ``capture`` (the
call and what is kept), ``fields`` (what ghosts hold), ``padded_step`` (buffers, capture and replay), ``package`` (what
a package's file says); ``packages/`` has one file for each package.
"""
