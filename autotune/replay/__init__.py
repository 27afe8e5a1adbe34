"""What can be said from records without a device: of samplers, of untuned schedules, of GPUs that are not here.

In: a config, packed trials, databases. Out: how soon each sampler finds the best schedule (``samplers``); the model of
time (``fit``) and its cross-validation (``untuned``, ``measured``); whether what is shipped compiles for other GPUs
(``portability``); the records in other autotuners' formats (``open_formats``); the
schedules that suffice, in words (``explained``). Read these in this order.
"""
