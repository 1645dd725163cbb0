"""Figure 2: can tokens be told from hidden states of their layer, of others, and by neighbours?"""

from __future__ import annotations

from typing import Any

import torch

from attnlens import Lens, TokenIdentifiability
from attnlens.recovery import TokenIdentifiabilityResult
from examples.identifiability import QUICK, THOROUGH
from examples.paper.published import compare
from examples.paper.setting import Setting, prepare, print_layers, report

MAPS = ("naive", "linear", "mlp")
DISTANCES = ("cosine", "l2")
NEIGHBOURS = 2


def run(setting: Setting) -> dict[str, Any]:
    """Collect hidden states once, then train each map."""
    tokens = TokenIdentifiability("mlp")
    # its map is solved for in closed form, so that one for each neighbour costs little
    near = TokenIdentifiability("linear", "l2", neighbours=NEIGHBOURS)
    with Lens(setting.model.model, tokens, near), torch.no_grad():
        for inputs, _ in setting.batches(setting.first):
            setting.model.model(**inputs)
    training = THOROUGH if setting.options.thorough else QUICK
    results = {
        f"{name} {distance}": tokens.using(name, distance, training=training.get(name)).compute()
        for name in MAPS
        for distance in DISTANCES
    }
    transferred, neighbours = results["linear cosine"], near.compute()
    rates = {name: result.rate for name, result in results.items()}
    counted = int(transferred.tokens[2])
    print_layers(f"Share of {counted} held-out tokens identified", list(rates.items()))
    print_transfer(transferred)
    print_layers(
        "Share of tokens whose neighbour is identified, linear map, l2 distance",
        [(f"{o:+}", neighbours.neighbours[:, i]) for i, o in enumerate(neighbours.offsets)],
    )
    print(
        f"\nChance {float(transferred.chance):.3f}, from position {float(transferred.position):.3f}"
    )
    setting.draw(
        "identifiability", "identifiability_curves", rates, chance=float(transferred.chance)
    )
    ours = {f"rate {name}": rate.tolist() for name, rate in rates.items()}
    ours |= {
        f"transfer {layer}": transferred.transfer[layer - 1].tolist()
        for layer in (1, 6, 11, 12)
        if layer <= len(transferred.transfer)
    }
    return {
        "tokens": transferred.tokens,
        "rate": rates,
        "error": {name: result.error for name, result in results.items()},
        "transfer": transferred.transfer,
        "offsets": neighbours.offsets,
        "neighbours": neighbours.neighbours,
        "chance": transferred.chance,
        "position": transferred.position,
        **compare(setting, ours),
    }


def print_transfer(result: TokenIdentifiabilityResult) -> None:
    """Print how maps trained on one layer do on the others."""
    rows = zip(result.layers, result.transfer, strict=True)
    print_layers(
        "Share identified from each layer by the linear map of another, cosine distance",
        [(f"map {layer}", row) for (_, layer), row in rows],
    )


if __name__ == "__main__":
    report(prepare(__doc__.splitlines()[0]), "identifiability", run)
