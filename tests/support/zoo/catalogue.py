"""How an architecture enters the zoo: by name, or by a registered recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from tests.support.zoo.shrink import tiny


@dataclass(frozen=True)
class Recipe:
    """What to build and what to feed it.

    Attributes:
        config: The tiny configuration.
        inputs: Arguments of the forward pass; None derives them from its signature.
        model_class: Name of a class of transformers. The default picks the base model that
            belongs to the configuration.
    """

    config: PreTrainedConfig
    inputs: Mapping[str, Tensor] | None = None
    model_class: str = "AutoModel"


@dataclass(frozen=True)
class Architecture:
    """One entry of the zoo.

    Attributes:
        modality: What the architecture reads, e.g. "text".
        recipe: Function from the model type to its recipe.
        padding_leaks: Why the outputs of real tokens depend on padding; None if they do not.
    """

    modality: str
    recipe: Callable[[str], Recipe]
    padding_leaks: str | None = None


class Catalogue:
    """The architectures of one modality, by model type.

    Args:
        modality: What these architectures read.
    """

    def __init__(self, modality: str) -> None:
        self.modality = modality
        self.architectures: dict[str, Architecture] = {}

    def add(
        self,
        *names: str,
        model_class: str = "AutoModel",
        padding_leaks: str | None = None,
        **overrides: Any,
    ) -> None:
        """Register architectures that shrink by the general rule and take default inputs.

        Args:
            *names: Model types.
            model_class: Name of the class to build.
            padding_leaks: Why the outputs of real tokens depend on padding.
            **overrides: Fields of the configuration, as for `tests.support.zoo.shrink.tiny`.
        """

        def recipe(model_type: str) -> Recipe:
            return Recipe(tiny(model_type, **overrides), model_class=model_class)

        self.architecture(*names, padding_leaks=padding_leaks)(recipe)

    def architecture(
        self, *names: str, padding_leaks: str | None = None
    ) -> Callable[[Callable[[str], Recipe]], Callable[[str], Recipe]]:
        """Register the decorated recipe for one or more model types.

        Args:
            *names: Model types, each passed to the recipe when it is built.
            padding_leaks: Why the outputs of real tokens depend on padding.

        Returns:
            A decorator that returns the recipe unchanged.

        Raises:
            ValueError: If a model type is registered twice.
        """

        def register(recipe: Callable[[str], Recipe]) -> Callable[[str], Recipe]:
            for name in names:
                if name in self.architectures:
                    raise ValueError(f"{name!r} is registered twice in {self.modality}.")
                self.architectures[name] = Architecture(self.modality, recipe, padding_leaks)
            return recipe

        return register
