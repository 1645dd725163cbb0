"""Observers by name, as on a command line: `attribution:probes=2`."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from typing import Any

import attnlens.attention as attention
import attnlens.attribution as attribution
import attnlens.recovery as recovery
from attnlens.errors import AttnLensError, InputError
from attnlens.observer import Observer

_SHORT = {"attribution": "hidden-token-attribution"}


def observer_names() -> dict[str, type[Observer]]:
    """Return the observers that a corpus can be scanned with, by name.

    Examples:
        >>> "head-statistics" in observer_names()
        True
    """
    rooms = (attention, attribution, recovery)
    kinds = (kind for room in rooms for kind in vars(room).values())
    named = {name_of(kind): kind for kind in kinds if _is_fit(kind)}
    return named | {short: named[full] for short, full in _SHORT.items()}


def name_of(kind: type[Observer]) -> str:
    """Return the name of a class of observers: `HeadStatistics` is `head-statistics`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", kind.__name__).lower()


def named_observer(text: str, label_names: Sequence[str] = ()) -> Observer:
    """Make an observer from its name and settings.

    Args:
        text: a name, or a name and settings, as in `attribution:probes=2,layers=[0,3]`. Settings
            are those of the class; words need no quotes.
        label_names: names of the labels of the corpus, for observers that have `label_names`
            and for which the text sets none.

    Returns:
        The observer.

    Raises:
        AttnLensError: as its class raises it for wrong values.
        InputError: if there is no such observer, or it has no such setting or value.

    Examples:
        >>> type(named_observer("attribution:probes=2")).__name__
        'HiddenTokenAttribution'
    """
    name, _, settings = text.partition(":")
    kinds = observer_names()
    if name not in kinds:
        raise InputError(f"No observer {name!r}. There are: {', '.join(sorted(kinds))}.")
    kind = kinds[name]
    arguments = _settings(settings, text)
    accepted = inspect.signature(kind).parameters
    unknown = sorted(arguments.keys() - accepted)
    if unknown:
        raise InputError(
            f"{kind.__name__} has no setting {unknown[0]!r}. It has: {', '.join(accepted)}."
        )
    if label_names and "label_names" in accepted:
        arguments.setdefault("label_names", tuple(label_names))
    try:
        return kind(**arguments)
    except AttnLensError:
        raise
    except Exception as error:  # whatever a wrong value leads to in the class
        raise InputError(f"{kind.__name__} cannot be made of {text!r}: {error}.") from error


def require_fit(observer: Any) -> Observer:
    """Refuse an observer that a scan cannot use.

    Args:
        observer: what a user passed.

    Returns:
        The observer.

    Raises:
        InputError: if it is no observer, needs a backward pass, or cannot be saved and merged.
    """
    if not isinstance(observer, Observer):
        raise InputError(f"Observers are instances, or names. Got {observer!r}.")
    name = type(observer).__name__
    if observer.needs_backward:
        raise InputError(f"{name} needs a backward pass, and a scan makes none.")
    observer.require_state()
    if observer.unsaved:
        raise InputError(
            f"{name} is to keep what a scan can neither save nor merge: {observer.unsaved}."
        )
    return observer


def _is_fit(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, Observer)
        and not (kind.needs_backward or kind.missing_methods())
    )


def _settings(text: str, whole: str) -> dict[str, Any]:
    """Read `probes=2,norm=fro` as the arguments of a call."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("every setting has a name")
        return {str(entry.arg): _value(entry.value) for entry in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise InputError(
            f"Settings of an observer are as in attribution:probes=2,norm=fro. Got {whole!r}: "
            f"{error}."
        ) from error


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
