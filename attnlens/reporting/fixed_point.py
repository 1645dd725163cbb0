"""Numbers as decimal integers, packed small: what a page shows of them is exactly rounded.

A binary fraction cannot be rounded to three decimals and then shown with three decimals right:
the integer `round(1000 x)` can.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

Integers = np.ndarray[Any, np.dtype[np.int32]]

_MISSING = np.iinfo(np.int32).min  # stands for NaN and infinities
_LARGEST = np.iinfo(np.int32).max


def whole(values: Tensor, decimals: int) -> Integers:
    """Round to decimals, as integers.

    Args:
        values: any shape.
        decimals: how many.

    Returns:
        `round(10**decimals · values)` as int32, half to even; what is not finite, or too large,
        is the smallest int32.
    """
    scaled = np.rint(values.double().numpy() * 10.0**decimals)
    fits = np.isfinite(scaled) & (np.abs(scaled) <= _LARGEST)
    return np.where(fits, scaled, _MISSING).astype(np.int32)


def map_planes(raw: Tensor, effective: Tensor, decimals: int) -> list[Integers]:
    """Round raw attention, effective attention and their difference, each by itself.

    Args:
        raw: A.
        effective: A⊥, of the same shape.
        decimals: how many.

    Returns:
        Integers of A and of A⊥, and what must be added to their difference, −1, 0 or 1, to give
        the integers of A − A⊥.
    """
    null = whole(raw.double() - effective.double(), decimals)
    first, second = whole(raw, decimals), whole(effective, decimals)
    fits = (first != _MISSING) & (second != _MISSING)
    return [first, second, np.where(fits, null - first + second, 0).astype(np.int32)]


def packed(planes: Sequence[Integers]) -> str:
    """Pack integers into text.

    Args:
        planes: int32 arrays.

    Returns:
        Base64 of the gzip of the four bytes of all numbers, lowest bytes first; the sign is the
        lowest bit, so that high bytes of small numbers are zero.
    """
    numbers = np.concatenate([plane.ravel() for plane in planes])
    folded = ((numbers << 1) ^ (numbers >> 31)).astype("<u4")
    by_byte = folded.view(np.uint8).reshape(-1, 4).T
    return base64.b64encode(gzip.compress(by_byte.tobytes(), 6, mtime=0)).decode()
