"""Pictures that a vision model saw, and the patches that are its tokens."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np

from attnlens.errors import InputError

_MOST_PIXELS = 480  # of a side


def placed(picture: Any, tokens: int) -> tuple[dict[str, Any], list[str]]:
    """Lay a picture under its tokens: patches in rows, after tokens that are of no patch.

    Args:
        picture: a PIL image, or an array `[height, width, 3]` of bytes or of numbers in `[0, 1]`.
        tokens: number of tokens.

    Returns:
        The picture for a page, and names of the tokens.

    Raises:
        InputError: if Pillow is not installed, or it is no picture.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise InputError(
            'Pictures need Pillow. Install it: pip install "attnlens[report]"'
        ) from error
    if isinstance(picture, Image.Image):
        image = picture.convert("RGB")
    else:
        pixels = np.asarray(picture)
        if pixels.ndim != 3 or pixels.shape[2] != 3:
            raise InputError(
                f"pictures must be PIL images or arrays [height, width, 3]. Got "
                f"{list(pixels.shape)}."
            )
        if pixels.dtype != np.uint8:
            pixels = np.rint(255 * np.clip(pixels, 0, 1)).astype(np.uint8)
        image = Image.fromarray(pixels)
    width, height = image.size
    rows = max(1, math.isqrt(tokens * height // width))
    columns = tokens // rows
    first = tokens - rows * columns
    image.thumbnail((_MOST_PIXELS, _MOST_PIXELS))
    file = io.BytesIO()
    image.save(file, "PNG")
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    names = ["[CLS]", *(f"extra {i}" for i in range(1, first))][:first]
    names += [f"row {i + 1}, column {j + 1}" for i in range(rows) for j in range(columns)]
    return {"source": source, "rows": rows, "columns": columns, "first": first}, names
