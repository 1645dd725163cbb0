"""From a raw attention call, of either tap, to a `Capture`; the tap adds layer and projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attnlens.capture import Capture, Masking
from attnlens.errors import CaptureError
from attnlens.tap.dispatch import InterfaceCall
from attnlens.tap.gradients import LiveContext
from attnlens.tap.layout import Product, declared_heads, matmul_product
from attnlens.tap.masks import Maskings, normalise_mask
from attnlens.tap.tracing import DirectCall, Event, SeenProduct


def capture_of_call(call: InterfaceCall, site: str, maskings: Maskings) -> Capture:
    """Record a call of the attention interface.

    Args:
        call: what was called with what.
        site: name of the attention module.
        maskings: the masks of the forward pass so far.

    Returns:
        The capture, without layer and projection.

    Raises:
        CaptureError: if the context has an unexpected shape.
    """
    arguments = call.arguments
    query, key, value = (arguments[name].detach() for name in ("query", "key", "value"))
    context = call.context.detach()
    expected = query.shape[1] * value.shape[3]
    if context.dim() != 4 or context.shape[2] * context.shape[3] != expected:
        raise CaptureError(
            f"{site}: the attention function returned {list(context.shape)} where "
            f"[B, Q, H, D] was expected for query {list(query.shape)}."
        )
    context = context.transpose(1, 2)
    query, key, value = (t.expand(context.shape[0], -1, -1, -1) for t in (query, key, value))
    masking = maskings.of(call, query, key)
    if masking.causal:
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    sinks = arguments.get("s_aux")
    sinks = arguments.get("sinks") if sinks is None else sinks
    return Capture(
        site,
        value,
        context,
        masking,
        query=query,
        grouped_key=key,
        scaling=_scaling(arguments.get("scaling"), query),
        dropout=float(arguments.get("dropout") or 0.0),
        softcap=arguments.get("softcap"),
        sinks=None if sinks is None else sinks.detach(),
        implementation=call.implementation,
    )


def capture_of_event(event: Event, module: nn.Module, site: str) -> Capture:
    """Record attention that a module ran itself.

    Args:
        event: a direct SDPA call, or a softmax and its product.
        module: what ran it, which may say how many heads there are.
        site: name of the module.

    Returns:
        The capture, without layer and projection.
    """
    heads = declared_heads(module)
    if isinstance(event, SeenProduct):
        return _of_product(event, heads, site)
    return _of_direct(event, heads, site)


def live_of_call(call: InterfaceCall) -> LiveContext:
    """Find the context of an interface call in the graph."""
    return LiveContext(call.context, lambda context: context.transpose(1, 2))


def live_of_event(event: Event, module: nn.Module) -> LiveContext:
    """Find the context of attention that a module ran itself in the graph.

    Args:
        event: a direct SDPA call, or a softmax and its product.
        module: what ran it, which may say how many heads there are.

    Returns:
        The context; its arrangement holds on to no activation.
    """
    if isinstance(event, DirectCall) and event.output.dim() == 4:
        return LiveContext(event.live, lambda context: context)
    heads, arrange = declared_heads(module), event.arrangement()
    return LiveContext(event.live, lambda context: arrange(context).by_heads(heads).output)


def _of_product(event: SeenProduct, heads: int | None, site: str) -> Capture:
    product = event.product.by_heads(heads)
    mask = None
    if event.keep is not None:
        keep = event.keep.expand(event.product.attention.shape)
        mask = Product(keep, event.product.value, event.product.output).by_heads(heads).attention
    return Capture(
        site,
        product.value,
        product.output,
        Masking(mask, empty_rows="uniform"),
        dropout=event.dropout,
        implementation="softmax",
        observed=product.attention,
    )


def _of_direct(event: DirectCall, heads: int | None, site: str) -> Capture:
    query, key, value, mask = event.query, event.key, event.value, event.mask
    output = event.output
    if output.dim() != 4:

        def folded(part: Tensor) -> Product:
            return matmul_product(part, event.value, event.output).by_heads(heads)

        if mask is not None:
            mask = folded(mask.expand(*output.shape[:-2], *mask.shape[-2:])).attention
        query, key = folded(query).attention, folded(key).attention
        value, output = folded(output).value, folded(output).output
    masking = normalise_mask(mask, "sdpa", query, key, {"is_causal": event.causal})
    return Capture(
        site,
        value,
        output,
        masking,
        query=query,
        grouped_key=key,
        scaling=_scaling(event.scaling, query),
        dropout=event.dropout,
        implementation="direct sdpa",
    )


def _scaling(given: Any, query: Tensor) -> float:
    """The factor on the logits; by default that of scaled dot-product attention."""
    return float(query.shape[-1] ** -0.5 if given is None else given)
