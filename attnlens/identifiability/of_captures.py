"""Is the attention of a captured head identifiable? Dimensions, verdicts and witnesses.

for capture in attnlens.record(model, **batch):
    print(attnlens.identify(capture).verdict(example=0, head=3))
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlens.algebra.problem import Problem, problem
from attnlens.algebra.softmax import attention_weights
from attnlens.algebra.values import require_finite_reach, require_squares
from attnlens.capture import Capture
from attnlens.errors import CaptureError
from attnlens.identifiability.dimensions import Identifiability, identifiability_of
from attnlens.identifiability.witnesses import (
    RealisabilityRank,
    SimplexWitness,
    SoftmaxWitness,
    realisability_rank_of,
    simplex_witness_of,
    softmax_witness_of,
)


def identify(capture: Capture, *, rtol: float | None = None) -> Identifiability:
    """Decide per example and head whether the output determines the attention.

    A position bias is taken as given: alternatives may change queries and keys only. Where only A
    was seen, or logits are capped, what a head can produce is not counted.

    Args:
        capture: the attention call.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`.

    Returns:
        Ranks, dimensions and verdicts, `[B, H]`.

    Raises:
        CaptureError: if rows of A do not sum to one because of attention sinks.

    References:
        Brunner et al., "On Identifiability in Transformers", ICLR 2020, section 3.1.

    Examples:
        >>> capture = record(model, **batch)[0]
        >>> found = identify(capture)
        >>> bool(found.identifiable_simplex.all())  # 19 tokens in 32 dimensions
        True
    """
    _require_whole_rows(capture)
    width = None
    if capture.query is not None and capture.softcap is None:
        width = capture.query.shape[-1]
    return identifiability_of(_posed(capture, rtol), width)


def simplex_witness(
    capture: Capture, *, rtol: float | None = None, generator: torch.Generator | None = None
) -> SimplexWitness:
    """Construct another row-stochastic A' with `A'T = AT`, far from A.

    Args:
        capture: the attention call.
        rtol: relative threshold for the numerical rank, in `[1e-7, 1)`.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        A', `[B, H, Q, K]`, with its residual and distances; `A' = A` where none exists.

    Raises:
        CaptureError: if rows of A do not sum to one because of attention sinks.

    Examples:
        >>> witness = simplex_witness(record(model, **batch)[0])
        >>> bool(witness.exists.any())  # 19 tokens in 32 dimensions leave no freedom
        False
    """
    _require_whole_rows(capture)
    return simplex_witness_of(_posed(capture, rtol), capture.attention(), generator)


def softmax_witness(
    capture: Capture,
    *,
    distance: float = 0.1,
    tolerance: float = 1e-10,
    max_iterations: int = 30,
    generator: torch.Generator | None = None,
) -> SoftmaxWitness:
    """Construct queries and keys of the same width with another A' but the same output.

    Args:
        capture: the attention call; its mask may hide padding only, its position bias is kept.
        distance: wanted `‖A' − A‖ / ‖A‖`.
        tolerance: largest accepted `‖A'T − AT‖ / ‖AT‖`.
        max_iterations: largest number of steps.
        generator: source of the first direction; a fixed seed by default.

    Returns:
        Q', K' and A' with residual and distance; those given where no witness exists.

    Raises:
        CaptureError: if A is not a plain softmax of the call's queries and keys.

    Examples:
        >>> witness = softmax_witness(record(model, **batch)[0])
        >>> bool(witness.exists.any())  # 19 tokens in 32 dimensions leave no freedom
        False
    """
    query, key = _plain_logits(capture)
    return softmax_witness_of(
        _posed(capture),
        query,
        key,
        bias=capture.bias,
        scaling=capture.scaling,
        distance=distance,
        tolerance=tolerance,
        max_iterations=max_iterations,
        generator=generator,
    )


def realisability_rank(
    capture: Capture, *, rtol: float | None = None, generator: torch.Generator | None = None
) -> RealisabilityRank:
    """Compare the rank of a simplex witness's logits with the width of a head.

    A rank above the width says that this witness cannot be produced by the head, not that none
    can: :func:`softmax_witness` constructs some that can.

    Args:
        capture: the attention call; its mask may hide padding only.
        rtol: singular values up to `rtol` times the largest count as zero.
        generator: source of the witness's direction; a fixed seed by default.

    Returns:
        Ranks of the witness and of A, `[B, H]`.

    Raises:
        CaptureError: if A is not a plain softmax of the call's queries and keys.

    Examples:
        >>> rank = realisability_rank(record(model, **batch)[0])
        >>> int(rank.attention_rank.max()) <= 32
        True
    """
    query, key = _plain_logits(capture)
    # In float64, because small probabilities that vanish in float32 have logits too.
    attention = attention_weights(
        query.double(), key, scaling=capture.scaling, mask=capture.mask, bias=capture.bias
    )
    return realisability_rank_of(
        _posed(capture),
        attention,
        query_width=query.shape[-1],
        bias=capture.bias,
        rtol=rtol,
        generator=generator,
    )


def _posed(capture: Capture, rtol: float | None = None) -> Problem:
    """The problem of a call, all of whose values must be finite."""
    if capture.reach is not None:
        require_finite_reach(capture.reach)
    require_squares(capture.value, capture.support.keys)
    return problem(capture, rtol)


def _require_whole_rows(capture: Capture) -> None:
    if capture.sinks is not None:
        raise CaptureError(
            f"{capture.site} (layer {capture.layer}) has attention sinks, so rows of A need not "
            f"sum to one and the argument about row-stochastic matrices does not apply. Its "
            f"nullity is in HeadStatistics."
        )


def _plain_logits(capture: Capture) -> tuple[Tensor, Tensor]:
    """Queries and keys of a call whose logits are their scaled products plus a fixed bias."""
    _require_whole_rows(capture)
    obstacle = ""
    if capture.query is None or capture.key is None:
        obstacle = "only A was seen in it, not its queries and keys"
    elif capture.softcap is not None:
        obstacle = f"its logits are capped at {capture.softcap:g}"
    if capture.query is None or capture.key is None or obstacle:
        raise CaptureError(
            f"{capture.site} (layer {capture.layer}) cannot be rebuilt from other queries and "
            f"keys: {obstacle}. identify() and simplex_witness() need neither."
        )
    return capture.query, capture.key
