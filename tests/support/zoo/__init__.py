"""Tiny, randomly initialised models of the encoder architectures of transformers.

``NAMES`` lists the model types that the installed transformers knows; ``build(name)`` returns
a model in eval mode with inputs that run it on a CPU in milliseconds. To add an architecture,
name it in the file of its modality: ``text.add("bert")`` if the general shrinking rule and the
default inputs are enough, else a function decorated with ``@text.architecture("bert")``.
"""

from tests.support.zoo.example import NAMES, Example, build, names

__all__ = ["NAMES", "Example", "build", "names"]
