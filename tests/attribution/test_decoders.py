"""Attribution on decoders: experts, hybrids, and caches that are empty or not."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from attnlens import HiddenTokenAttribution, Lens
from attnlens.errors import InputError
from attnlens.tap.sites import Catalogue
from tests.support.hooks import is_clean
from tests.support.zoo import Example, build

# Their experts run as one grouped product, which has no forward derivative.
EXPERTS = ("deepseek_v3", "gpt_oss", "jamba", "mixtral", "qwen3_moe", "qwen3_next")
HYBRIDS = ("bamba", "lfm2", "zamba2")


def exact(example: Example, **inputs: object) -> HiddenTokenAttribution:
    observer = HiddenTokenAttribution(probes=None, keep="matrices")
    with Lens(example.model, observer), torch.no_grad():
        example.model(**{**example.inputs, **inputs})
    return observer


def autograd_norms(name: str) -> torch.Tensor:
    """`‖∂e_j/∂x_i‖_F`, `[L, B, K, K]`, by one backward pass per component in float64."""
    example = build(name, dtype=torch.float64)
    if name in EXPERTS:
        example.model.set_experts_implementation("eager")
    first, *_ = layers = [site.module for site in Catalogue(example.model).layers()]
    entered: list[torch.Tensor] = []
    left: list[torch.Tensor] = []

    def enter(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        entered.append(hidden.detach().requires_grad_())
        if args:
            return (entered[0], *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": entered[0]}

    first.register_forward_pre_hook(enter, with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(
            lambda module, args, out: left.append(out[0] if isinstance(out, tuple) else out)
        )
    example.model(**example.inputs)
    rows = []
    for output in left:
        blocks = [  # no example sees another
            torch.autograd.grad(output[:, j, c].sum(), entered[0], retain_graph=True)[0]
            for j in range(output.shape[1])
            for c in range(output.shape[2])
        ]
        squares = torch.stack(blocks).square().sum(-1).unflatten(0, output.shape[1:])
        rows.append(squares.sum(1).sqrt().permute(1, 2, 0))
    return torch.stack(rows)


@pytest.mark.parametrize("name", [*EXPERTS, *HYBRIDS])
def test_it_equals_autograd(name: str) -> None:
    example = build(name)
    (matrices,) = exact(example).matrices
    assert is_clean(example.model)
    assert matrices.layers == tuple(range(example.model.config.num_hidden_layers))
    both = matrices.mask[:, :, None] & matrices.mask[:, None]
    expected = autograd_norms(name) * both
    error = (matrices.norm.double() - expected).abs().amax((1, 2, 3)) / expected.amax((1, 2, 3))
    assert error.max() <= 1e-6


def test_experts_run_as_the_user_chose_outside_of_the_rerun() -> None:
    """The outputs are those of the grouped product, bit for bit, and so is the next pass."""
    example = build("mixtral")
    with torch.no_grad():
        before = example.model(**example.inputs).last_hidden_state
        with Lens(example.model, HiddenTokenAttribution(probes=1)):
            looked = [example.model(**example.inputs).last_hidden_state for _ in range(2)]
    assert all(torch.equal(before, other) for other in looked)


@pytest.mark.parametrize("name", ["gpt2", "mistral", "jamba"])
def test_an_empty_cache_is_no_obstacle(name: str) -> None:
    example = build(name)
    without, default = exact(example, use_cache=False), exact(example)
    for one, other in zip(without.matrices, default.matrices, strict=True):
        assert torch.equal(one.norm, other.norm)


def test_a_cache_with_tokens_is_refused_in_words() -> None:
    example = build("llama")
    ids = example.inputs["input_ids"]
    with torch.no_grad():
        cache = example.model(ids).past_key_values
    static = StaticCache(example.model.config, max_cache_len=16)
    for given, length in ((cache, 20), (static, 10)):
        kind = type(given).__name__
        with pytest.raises(InputError, match=f"{kind}.*one forward pass over the whole") as error:
            exact(example, input_ids=ids, attention_mask=None, past_key_values=given)
        assert "use_cache" not in str(error.value)
        assert given.get_seq_length() == length  # written once
    assert is_clean(example.model)
