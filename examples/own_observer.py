"""An observer of one's own has two methods. Here one does nothing, and one finds broad heads."""

from __future__ import annotations

import torch
from transformers import AutoModel, AutoTokenizer

from attnlens import Capture, Lens, Observer, scan
from attnlens.demo import model_folder, paragraphs
from attnlens.errors import InputError


class Idle(Observer):
    """Sees every attention call and does nothing with it."""

    def update(self, capture: Capture) -> None:
        """Look away."""

    def compute(self) -> None:
        """Return nothing."""


class BroadestHead(Observer):
    """The head whose largest attention weight is smallest: the mean over the tokens of a batch."""

    def __init__(self) -> None:
        self.largest: dict[tuple[int, int], torch.Tensor] = {}

    def update(self, capture: Capture) -> None:
        """Average the largest weight of every row of A, head by head."""
        rows = capture.real_rows.double()  # [B, 1, Q]
        largest = capture.attention().amax(-1) * rows  # [B, H, Q]
        for head, mean in enumerate(largest.sum((0, 2)) / rows.sum()):
            self.largest[capture.layer, head] = mean

    def compute(self) -> tuple[int, int, float]:
        """Return layer, head and weight."""
        layer, head = min(self.largest, key=lambda place: self.largest[place].item())
        return layer, head, self.largest[layer, head].item()


def main() -> None:
    """Look at the packaged encoder with both, and let a scan say what more it would need."""
    model = AutoModel.from_pretrained(model_folder()).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    idle, broadest = Idle(), BroadestHead()
    with Lens(model, idle, broadest), torch.no_grad():
        model(**tokenizer(paragraphs(), padding=True, return_tensors="pt"))
    layer, head, weight = broadest.compute()
    print(f"Head {head} of layer {layer} gives no token more than {weight:.3f} on average.")
    print(f"The other observer computed {idle.compute()}.")
    try:
        scan(model, tokenizer, paragraphs(), [idle])
    except InputError as error:
        print(f"A scan saves and merges: {error}")


if __name__ == "__main__":
    main()
