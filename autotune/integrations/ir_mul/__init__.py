"""What stands between a model's convolutions, for node features in layout ``ir_mul`` (component, then channel).

In: e3nn's and a package's modules, whose parameters stay theirs. Out: stand-ins, all plain operations of torch. A model
changes its layout as a whole. Read ``trilinear``, then ``linear``.
"""
