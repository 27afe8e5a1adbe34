"""The errors that Equitune raises: each says what was given, what was expected and what to do."""


class EquituneError(Exception):
    """Base of Equitune's errors. The command line prints the message and exits with code 2."""


class ProblemError(EquituneError, ValueError, AssertionError):
    """The problem is ill-defined: unknown irreps, broken selection rules, unequal multiplicities.

    Also an AssertionError, because e3nn raises that.
    """


class UnsupportedError(EquituneError, NotImplementedError):
    """The problem is well-defined, but the generator does not cover it."""


class ScheduleError(EquituneError, ValueError):
    """The schedule breaks a limit (registers, shared memory, divisibility) or has an unknown knob."""


class InputError(EquituneError, ValueError, RuntimeError, AssertionError):
    """Tensors do not fit the operator or each other: shape, dtype, device or index range.

    Also a RuntimeError and an AssertionError, because torch and e3nn raise those.
    """


class ToolMissingError(EquituneError, RuntimeError):
    """This machine lacks a compiler, a driver or an optional package that the call needs."""


class CacheError(EquituneError, RuntimeError):
    """The kernel cache cannot be used: its folder is not private, not writable or full."""


class PackError(EquituneError, RuntimeError):
    """A pack of kernels cannot be read or written, is damaged, or is for other processors."""


class CompileError(EquituneError, RuntimeError):
    """The compiler rejected generated source; the message holds the compiler's log."""


class LaunchError(EquituneError, RuntimeError):
    """A kernel failed to load, to launch or to run."""


class TuningMissError(EquituneError, LookupError):
    """The caller requires a tuned schedule, and the database has none that fits this device and the request."""


def cause_of(error: BaseException) -> str:
    """The cause without the path, for messages that already name the path (an OSError's text repeats it)."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
