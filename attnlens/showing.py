"""What can lay itself out as a page; the pages are drawn by whoever registers for a class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from importlib import import_module
from typing import Any

DRAWERS: list[str] = []
"""Modules that register pages; they are imported when the first page is asked for."""


class Shown:
    """A mixin of things that have a page."""

    def show(
        self,
        example: int | None = None,
        *,
        tokens: Sequence[Sequence[str]] | None = None,
        **choices: Any,
    ) -> Any:
        """Lay this out as an interactive page, which a notebook shows inline.

        Args:
            example: the only example whose maps are shown; None shows all.
            tokens: tokens of each example.
            **choices: see :func:`attnlens.report`.

        Returns:
            The page, a :class:`~attnlens.reporting.page.Report`.
        """
        for name in DRAWERS:
            import_module(name)
        return page_of(self, example=example, tokens=tokens, **choices)


@singledispatch
def page_of(source: Any, **choices: Any) -> Any:
    """Lay something out as a page.

    Args:
        source: of a class that is registered.
        **choices: see :func:`attnlens.report`.

    Raises:
        TypeError: if the class is not registered.
    """
    raise TypeError(f"There is no page of a {type(source).__name__}.")
