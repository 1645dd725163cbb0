"""The Trainer's own steps, with something around them."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from transformers import TrainerCallback


def calling_trainer(callback: TrainerCallback) -> Any | None:
    """Find the Trainer that is notifying a callback.

    A callback is told the model and the optimizer, but not whose callback it is; without the
    Trainer it can neither log nor close what it opened when a step fails.

    Args:
        callback: the callback.

    Returns:
        The Trainer; None if it cannot be found among the callers.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if any(known is callback for known in getattr(handler, "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def loss_scale(trainer: Any, items: Any) -> float:
    """Find the factor that a Trainer puts on the loss of a micro-batch.

    Args:
        trainer: the Trainer.
        items: how many items the whole step has, or None if the Trainer does not count them.

    Returns:
        The scale of mixed precision, over the number of accumulated micro-batches where the
        Trainer divides by it. A loss that is normalised by the items of the whole step is left as
        it is.
    """
    scaler = trainer.accelerator.scaler
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    normalised = getattr(trainer, "loss_is_scaled_for_ga", None)
    if normalised is None:
        by_model = trainer.model_accepts_loss_kwargs and items is not None
        normalised = by_model or trainer.compute_loss_func is not None
    return scale if normalised else scale / trainer.current_gradient_accumulation_steps


def surround(
    trainer: Any, name: str, callback: TrainerCallback, around: Callable[..., Any]
) -> None:
    """Run something around a method of a Trainer, for as long as a callback belongs to it.

    Args:
        trainer: the Trainer.
        name: the method.
        callback: the callback.
        around: called instead, with the method and its arguments.
    """
    method = getattr(trainer, name)
    # Weak, so that a Trainer and its model go as soon as nobody else holds them.
    find_method: Callable[[], Any] = lambda: method  # noqa: E731
    if inspect.ismethod(method):
        find_method = weakref.WeakMethod(method)
    find_trainer: Callable[[], Any] = weakref.ref(trainer)

    def surrounded(*args: Any, **kwargs: Any) -> Any:
        if any(known is callback for known in find_trainer().callback_handler.callbacks):
            return around(find_method(), *args, **kwargs)
        return find_method()(*args, **kwargs)

    setattr(trainer, name, surrounded)
