"""Keep captures themselves: for looking into one forward pass, not for streaming."""

from __future__ import annotations

from dataclasses import replace

from attnlens.capture import Capture
from attnlens.observer import Observer


class Recording(Observer):
    """Keep every capture it is handed, with the activations they hold, until `reset()`.

    Examples:
        >>> recording = Recording()
        >>> with Lens(model, recording), torch.no_grad():
        ...     output = model(**batch)
        >>> [capture.layer for capture in recording.compute()]
        [0, 1, 2, 3, 4, 5]
    """

    captures: list[Capture]

    def __init__(self, layers: list[int] | None = None) -> None:
        super().__init__(layers)
        self.captures = []

    def update(self, capture: Capture) -> None:
        """Keep one attention call.

        Args:
            capture: the call.
        """
        # A model may change its context in place after the call.
        self.captures.append(replace(capture, context=capture.context.clone()))

    def compute(self) -> list[Capture]:
        """Return the captures in the order of their calls."""
        return list(self.captures)

    def reset(self) -> None:
        """Let the captures go."""
        self.captures = []

    def merge(self, other: Recording) -> Recording:
        """Append the captures of another recording.

        Args:
            other: left unchanged.

        Returns:
            This recording.
        """
        self.captures += other.captures
        return self
