"""Every error attnlens raises on purpose, under one base class."""


class AttnLensError(Exception):
    """Base class: catch this to catch everything attnlens raises on purpose."""


class UnsupportedAttentionError(AttnLensError):
    """A module has no softmax·V attention, or attention that no tap can see."""


class CaptureError(AttnLensError):
    """An attention call was seen but could not be turned into a faithful record."""


class InputError(AttnLensError, ValueError):
    """An argument has the wrong shape, dtype or value; also a ``ValueError``."""


class NonFiniteError(AttnLensError, ValueError):
    """A tensor that must be finite holds NaN or Inf; the message names example and head."""


class MemoryBoundError(AttnLensError, MemoryError):
    """Keeping what was asked for would exceed the stated memory bound."""


class AttnLensWarning(UserWarning):
    """Something the user should know that does not make the result wrong."""
