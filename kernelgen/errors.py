"""Every error that Equitune raises on purpose: each says what was given, what was expected and what to do."""


class EquituneError(Exception):
    """Base of all deliberate errors; the command line prints its one line and exits with code 2."""


class ProblemError(EquituneError, ValueError, AssertionError):
    """The tensor product itself is ill-defined: unknown irreps, broken selection rules, unequal multiplicities.

    An AssertionError too, because that is what e3nn raises.
    """


class UnsupportedError(EquituneError, NotImplementedError):
    """The tensor product is well-defined, but outside what the generator covers."""


class ScheduleError(EquituneError, ValueError):
    """The schedule breaks a limit (registers, shared memory, divisibility) or has an unknown knob."""


class InputError(EquituneError, ValueError, RuntimeError, AssertionError):
    """Tensors handed to an operator disagree with it or with each other: shape, dtype, device or index range.

    A RuntimeError and an AssertionError too, because those are what torch and e3nn raise.
    """


class ToolMissingError(EquituneError, RuntimeError):
    """A compiler, a driver or an optional package that this call needs is not on this machine."""


class CacheError(EquituneError, RuntimeError):
    """Compiled kernels cannot be kept or trusted: a folder is not private, cannot be written or is full."""


class CompileError(EquituneError, RuntimeError):
    """The compiler rejected generated source; the message holds its log."""


class LaunchError(EquituneError, RuntimeError):
    """A kernel could not be loaded, launched, or failed while it ran."""


class TuningMissError(EquituneError, LookupError):
    """No schedule is known that was tuned on this device, or keeps what was asked for, and it may not do without."""


def cause_of(error: BaseException) -> str:
    """What went wrong, for a message that names the path itself: an OSError's own text would repeat it."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
