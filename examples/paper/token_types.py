"""Figures 1b, 1c and 5: how much raw and effective attention special tokens and others get."""

from __future__ import annotations

from typing import Any

import torch

from attnlens import LabelAttention, Lens
from attnlens.attention.labels import LabelAttentionResult
from examples.paper.published import compare
from examples.paper.setting import TYPES, Encoded, Setting, prepare, print_layers, report

LARGE = 2.0  # times what uniform attention would give
SHOWN = 3  # types in the paper's figures


def run(setting: Setting) -> dict[str, Any]:
    """Look at sentences of up to D tokens and at longer ones apart, and merge the two."""
    width = setting.width
    groups = {
        f"up to {width} tokens": [encoded for encoded in setting.first if len(encoded) <= width],
        f"more than {width} tokens": [e for e in setting.first if len(e) > width],
    }
    types, tags = observers(setting)
    numbers: dict[str, Any] = {}
    for name, sentences in groups.items():
        if sentences:
            group_types, group_tags = look(setting, sentences)
            result = group_types.compute()
            print_attention(f"Attention in {len(sentences)} sentences of {name}", result)
            large = print_large(result)
            numbers[name] = {"sentences": len(sentences), "large": large, **summary(result)}
            types.merge(group_types)
            tags.merge(group_tags)
    # of the longer sentences, if there are any: up to D tokens nothing can differ
    raw, effective = (values[..., :SHOWN] for values in (result.raw, result.effective))
    setting.draw("token_types", "attention_by_token_type", raw, effective, TYPES[:SHOWN])
    result = types.compute()
    numbers["all"] = summary(result)
    if setting.tag_names:
        print_attention("Attention to parts of speech", tags.compute())
        numbers["by_part_of_speech"] = summary(tags.compute())
    ours = {
        f"{kind} {name}": getattr(result, kind)[..., place].mean(1).tolist()
        for kind in ("raw", "effective")
        for place, name in enumerate(TYPES[:SHOWN])
    }
    return numbers | compare(setting, ours)


def observers(setting: Setting) -> tuple[LabelAttention, LabelAttention]:
    """Observe attention by type of token, looked up by its id, and by part of speech."""
    types = LabelAttention(lambda inputs: setting.type_of_token[inputs["input_ids"]], TYPES)
    return types, LabelAttention(label_names=setting.tag_names or ("none",))


def look(setting: Setting, sentences: list[Encoded]) -> tuple[LabelAttention, LabelAttention]:
    """Run sentences through the model."""
    types, tags = observers(setting)
    with Lens(setting.model.model, types, tags), torch.no_grad():
        for inputs, tags.labels in setting.batches(sentences):
            setting.model.model(**inputs)
    return types, tags


def print_attention(title: str, result: LabelAttentionResult) -> None:
    """Print raw and effective attention to every label, means over heads."""
    for kind, values in (("raw", result.raw), ("effective", result.effective)):
        columns = zip(result.labels, values.mean(1).T, strict=True)
        print_layers(f"{title}: {kind}", list(columns))


def print_large(result: LabelAttentionResult) -> list[dict[str, Any]]:
    """List layers in which a special token gets far more than its share of raw attention."""
    print(f"\nWhere raw attention to a special token is over {LARGE:g} times the uniform share")
    rows = []
    for place, name in enumerate(TYPES[:2]):
        raw, effective, share = (
            tensor[..., place].mean(1).tolist()
            for tensor in (result.raw, result.effective, result.tokens)
        )
        for layer, there, seen, uniform in zip(result.layers, raw, effective, share, strict=True):
            if there > LARGE * uniform:
                rows.append({"type": name, "layer": layer[1], "raw": there, "effective": seen})
                print(f"  {name} layer {layer[1]}: raw {there:.3f}, effective {seen:.3f}")
    return rows


def summary(result: LabelAttentionResult) -> dict[str, Any]:
    """Give every quantity, `[L, H, G]`."""
    return {"labels": result.labels, **result.tensors()}


if __name__ == "__main__":
    report(prepare(__doc__.splitlines()[0]), "token_types", run)
