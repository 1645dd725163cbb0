"""Numbers as integers of few bits, packed small: a page shows no more digits than it holds."""

from __future__ import annotations

import base64
import zlib

import numpy as np
from torch import Tensor


def unit_of(largest: float, bits: int) -> float:
    """Choose what one step of signed integers stands for.

    Args:
        largest: largest size of a number.
        bits: of the integers.

    Returns:
        The smallest unit in which it is an integer of so many bits.
    """
    return (largest or 1.0) / ((1 << (bits - 1)) - 1)


def packed(values: Tensor, unit: float, bits: int) -> str:
    """Round numbers to multiples of a unit, and pack them into text.

    Args:
        values: any shape; their sizes are at most `(2**(bits − 1) − 1) · unit`.
        unit: what an integer stands for; a number is right to half of it.
        bits: of the integers, up to 32.

    Returns:
        Base64 of the zlib stream of the bytes of all integers, the lowest bytes of all first. The
        sign is the lowest bit, so that small numbers have small bytes; the largest integer stands
        for what is not finite.
    """
    numbers = values.double().numpy().ravel() / unit
    finite = np.isfinite(numbers)
    whole = np.rint(np.where(finite, numbers, 0.0)).astype(np.int64)
    folded = np.where(finite, (whole << 1) ^ (whole >> 63), 2**bits - 1).astype("<u4")
    by_byte = folded.view(np.uint8).reshape(-1, 4).T[: (bits + 7) // 8]
    return base64.b64encode(zlib.compress(by_byte.tobytes(), 6)).decode()
