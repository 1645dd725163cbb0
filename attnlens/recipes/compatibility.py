"""Does attnlens work on a model of this name?"""

from __future__ import annotations

from torch import nn

from attnlens.checking import Verdict, check
from attnlens.recipes.ingredients import Progress, load, silent


def check_model(model: nn.Module | str, progress: Progress = silent) -> Verdict:
    """Run a model with and without a lens, and compare everything that a lens relies on.

    Args:
        model: the model, or its name; its inputs are made up from its configuration.
        progress: told when the model is loaded.

    Returns:
        The verdict. An unsupported model is a verdict too, not an error.
    """
    return check(load(model, progress) if isinstance(model, str) else model)
