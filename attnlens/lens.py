"""`Lens`: look at a model's attention from inside its own forward pass.

with Lens(model) as lens:
    model(**batch)
print(lens.summary())
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, get_args

import torch
from torch import Tensor, nn

from attnlens.attention.maps import EffectiveAttention, stacked_maps
from attnlens.attention.recording import Recording
from attnlens.attention.statistics import HeadStatistics
from attnlens.capture import Capture
from attnlens.errors import AttnLensError, AttnLensWarning, InputError, UnsupportedAttentionError
from attnlens.kernels import Backend, resolve
from attnlens.observer import GradientObserver, LayerObserver, Observer
from attnlens.results import facts_html
from attnlens.showing import Shown
from attnlens.tap.forwards import Mode
from attnlens.tap.interrupts import attachment
from attnlens.tap.selection import Kinds, select
from attnlens.tap.sites import Catalogue, mixing_module
from attnlens.tap.tap import Tap

_SWITCH = "Call torch.backends.mha.set_fastpath_enabled(False) first."


class Lens(Shown):
    """Attach observers to a model for the duration of a `with` block.

    The model's outputs are bit-identical with and without a lens. Its configuration, masks,
    attention implementation and random state are not touched, and on exit, however it happens,
    no hook and no patch is left. Forward passes in other threads than the one that opened the
    lens are not counted: each thread may open a lens with observers of its own, to be merged.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        *observers: what to compute; one `HeadStatistics` by default.
        layers: layer indices (negative ones from the end) or names of attention modules to look
            at; None looks at all. Observers of whole layers give results for the layers of these.
        every: look at each N-th forward pass, beginning with the first.
        kinds: kinds of attention to look at: `"encoder"`, `"decoder"`, `"cross"`. By default
            the encoder's self-attention, or where a model has none, every self-attention.
        backend: kernels to compute with: `"torch"`, `"triton"`, or `"auto"` for Triton on CUDA
            tensors where it is installed.
        on: forward passes to look at and to count: those of a model in `"train"` mode, in
            `"eval"` mode, or `"both"`.

    Raises:
        InputError: if an argument is of the wrong kind or value.
        UnsupportedAttentionError: on exit, if forward passes ran but no attention was seen.

    Examples:
        >>> with Lens(model, HeadStatistics()) as lens, torch.no_grad():
        ...     output = model(**batch)
        >>> result = lens.observers[0].compute()
        >>> tuple(result.effective_fraction.shape)  # layers × heads
        (6, 12)
    """

    def __init__(
        self,
        model: nn.Module,
        *observers: Observer,
        layers: Iterable[int | str] | None = None,
        every: int = 1,
        kinds: Kinds = None,
        backend: Backend = "auto",
        on: Mode = "both",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"model must be a torch module. Got {type(model).__name__}.")
        for observer in observers:
            if not isinstance(observer, Observer):
                raise InputError(
                    f"Observers are instances such as HeadStatistics(). Got {observer!r}."
                )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every must be a positive integer. Got {every!r}.")
        self.model = model
        self.observers: tuple[Observer, ...] = observers or (HeadStatistics(),)
        if on not in get_args(Mode):
            raise InputError(f'on must be "train", "eval" or "both". Got {on!r}.')
        self.every = every
        self.backend: Backend = backend
        resolve(backend, torch.device("cpu" if backend == "auto" else _device_of(model)))
        self.on = on
        wanted = (layers,) if isinstance(layers, (int, str)) else layers
        self.layers = None if wanted is None else list(wanted)
        self.selection = select(Catalogue(model), self.layers, kinds)
        self._tap: Tap | None = None
        self._attachment = attachment(lambda stack: None)

    @property
    def active(self) -> bool:
        """Whether the lens is attached now."""
        return self._tap is not None

    def __enter__(self) -> Lens:
        if self._tap is not None:
            raise AttnLensError(
                "This lens is active already. Open a second Lens to look twice at once."
            )
        # The tap must not know the lens: one that is dropped without an exit then detaches.
        audience = _Audience(self.observers, self.backend)
        tap = Tap(
            self.selection,
            audience.update,
            every=self.every,
            mode=self.on,
            begin=audience.begin,
            deliver_gradient=audience.update_gradient if audience.wants_gradients else None,
            layer_observers=[o for o in self.observers if isinstance(o, LayerObserver)],
        )
        self._attachment = attachment(tap.attach)
        try:
            next(self._attachment)
            self._tap = tap
        except BaseException:
            self._attachment.close()
            self._tap = None
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            tap, self._tap = self._tap, None
        finally:
            self._attachment.close()
        if kind is None and tap is not None:
            self._report_gaps(tap)

    def summary(self, field: str = "effective_fraction") -> str:
        """Return a layer × head table of one field of the first `HeadStatistics`.

        Args:
            field: a field of :class:`~attnlens.attention.statistics.HeadStatisticsResult`.

        Returns:
            The table as text, which displays as such.

        Raises:
            InputError: if the lens has no `HeadStatistics`, or no such field exists.
        """
        for observer in self.observers:
            if isinstance(observer, HeadStatistics):
                return observer.compute().table(field)
        raise InputError("summary() shows HeadStatistics; this lens was given none.")

    def as_attentions(self, stack: str | None = None, *, raw: bool = False) -> tuple[Tensor, ...]:
        """Return effective attention in the layout of `outputs.attentions`.

        Tools that take a model's attentions, such as BertViz, take these as they are.

        Args:
            stack: the stack of layers; may be left out where only one was seen.
            raw: return raw attention of the same layers and heads instead.

        Returns:
            `[B, H, Q, K]` float32 for each layer seen, first to last; all batches along B.

        Raises:
            InputError: if the lens has no `EffectiveAttention`, or its maps do not fit together.
        """
        for observer in self.observers:
            if isinstance(observer, EffectiveAttention):
                return stacked_maps(observer.compute(), stack, raw=raw)
        raise InputError("as_attentions() shows EffectiveAttention; this lens was given none.")

    def __repr__(self) -> str:
        layers = "all layers" if self.layers is None else f"layers {self.layers}"
        state = "attached" if self.active else "not attached"
        return (
            f"Lens on {type(self.model).__name__}, {state}\n"
            f"  {layers}, kinds {', '.join(sorted(self.selection.kinds))}\n"
            f"  {', '.join(map(repr, self.observers))}"
        )

    def _repr_html_(self) -> str:
        html = facts_html(
            "Lens",
            [
                ("model", type(self.model).__name__),
                ("observers", ", ".join(type(observer).__name__ for observer in self.observers)),
                ("attached", "now" if self.active else "no"),
            ],
        )
        for observer in self.observers:
            if isinstance(observer, HeadStatistics) and observer.sums:
                html += observer.compute()._repr_html_()
        return html

    def _report_gaps(self, tap: Tap) -> None:
        if not tap.forwards.count:
            mode = {"train": " in training mode", "eval": " in evaluation mode"}.get(self.on, "")
            warnings.warn(
                f"No forward pass of {type(self.model).__name__}{mode} ran inside the lens, so its "
                f"observers saw nothing.{_elsewhere(tap)}",
                AttnLensWarning,
                stacklevel=3,
            )
            return
        if tap.forwards.without_values:
            told = (
                f"Forward passes under {' and '.join(sorted(tap.forwards.without_values))} ran "
                f"inside the lens. Their tensors hold no values to look at, so they are missing "
                f"from the results. Call the model itself inside the lens."
            )
            warnings.warn(told, AttnLensWarning, stacklevel=3)
            if not tap.forwards.looked:
                return
        silent = [] if tap.layers is None else tap.layers.silent
        if tap.layers is not None and not tap.layers.fired:
            if tap.fused:
                raise UnsupportedAttentionError(self._why_nothing(tap))
            raise UnsupportedAttentionError(
                f"{tap.forwards.count} forward pass(es) ran inside the lens, but none called a "
                f"layer such as {silent[0]} as a module, so its hidden states cannot be seen."
            )
        if any(not isinstance(observer, LayerObserver) for observer in self.observers):
            if not tap.fired:
                raise UnsupportedAttentionError(self._why_nothing(tap))
            silent = [*silent, *tap.silent]
        if tap.fused:
            warnings.warn(
                f"{_some(sorted(tap.fused))} ran torch's fused attention, which hides A. Their "
                f"layers are missing from the results. {_SWITCH}",
                AttnLensWarning,
                stacklevel=3,
            )
            silent = [name for name in silent if name not in tap.fused]
        if tap.gradients is not None and not tap.gradients.delivered:
            warnings.warn(
                "No gradient reached any attention inside the lens. Call backward() before the "
                "lens closes, on a model whose attention layers are not all frozen.",
                AttnLensWarning,
                stacklevel=3,
            )
        if not silent:
            return
        warnings.warn(
            f"These modules did not run inside the lens: {_some(silent)}. Their layers "
            f"are missing from the results.",
            AttnLensWarning,
            stacklevel=3,
        )

    def _why_nothing(self, tap: Tap) -> str:
        """Say why forward passes ran and no chosen attention was heard."""
        passes = f"{tap.forwards.count} forward pass(es) ran inside the lens"
        if tap.fused:
            return (
                f"{passes}, but {min(tap.fused)} ran torch's fused attention kernel, which hides "
                f"A. {_SWITCH}"
            )
        if tap.heard:
            return (
                f"{passes} and attention ran at {min(tap.heard)}, but none of it was chosen: "
                f"layers={self.layers}, kinds={sorted(self.selection.kinds)}. Choose other layers "
                f"or pass kinds=."
            )
        if tap.silent:
            return f"{passes}, but {tap.silent[0]} never called its attention function."
        name, module = mixing_module(self.model)
        return (
            f"{passes}, but no softmax·V product was seen anywhere: {name} "
            f"({type(module).__name__}) mixes tokens by other means, so there is no attention "
            f"matrix A to look at."
        )


class _Audience:
    """The observers of a lens, and what they are told of attention calls."""

    def __init__(self, observers: Sequence[Observer], backend: Backend) -> None:
        self._observers = observers
        self._backend = backend
        self._gradients = [o for o in observers if isinstance(o, GradientObserver)]
        self.wants_gradients = bool(self._gradients)

    def begin(self, inputs: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.begin_forward(inputs)

    def update(self, capture: Capture) -> None:
        if self._backend != "auto":
            capture = replace(capture, backend=self._backend)
        for observer in self._observers:
            if observer.wants(capture):
                observer.update(capture)

    def update_gradient(self, capture: Capture, gradient: Tensor) -> None:
        for observer in self._gradients:
            if observer.wants(capture):
                observer.update_gradient(capture, gradient)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _elsewhere(tap: Tap) -> str:
    if not tap.elsewhere:
        return ""
    return (
        f" {tap.elsewhere} began in other threads: open a lens with observers of its own in each "
        f"thread, and merge() them."
    )


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def record(model: nn.Module, *args: Any, **inputs: Any) -> list[Capture]:
    """Run one forward pass without gradients and return its attention calls.

    Args:
        model: a `PreTrainedModel`, or any module with one inside.
        *args: positional inputs of the model.
        **inputs: keyword inputs of the model.

    Returns:
        The captures of the encoder's self-attention in the order of the calls. To see other
        attention, use `Lens(model, Recording(), kinds=...)`.

    Examples:
        >>> captures = record(model, **batch)
        >>> len(captures), captures[0].kind, tuple(captures[0].context.shape)
        (6, 'encoder', (2, 12, 19, 32))
    """
    recording = Recording()
    with Lens(model, recording), torch.no_grad():
        model(*args, **inputs)
    return recording.compute()
