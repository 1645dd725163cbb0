"""The state of observers beside a checkpoint: one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors import torch as tensor_files

from attnlens.errors import InputError
from attnlens.files import write_atomically
from attnlens.training.recent import State

NAME = "attnlens_observers.safetensors"
_FORMAT = 1


def write_state(folder: str | os.PathLike[str], state: State, observers: Sequence[str]) -> None:
    """Write a state into a folder.

    Args:
        folder: exists.
        state: named tensors.
        observers: kinds of the observers, in order.
    """
    header = json.dumps({"format": _FORMAT, "observers": list(observers)})
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    write_atomically(Path(folder) / NAME, tensor_files.save(tensors, {"attnlens": header}))


def read_state(folder: str | os.PathLike[str], observers: Sequence[str]) -> State:
    """Read what :func:`write_state` wrote.

    Args:
        folder: the folder.
        observers: kinds of the observers that will take it up.

    Returns:
        Named tensors.

    Raises:
        InputError: if the file is missing, damaged, or of other observers.
    """
    path = Path(folder) / NAME
    if not path.is_file():
        raise InputError(f"{folder} holds no {NAME}. Give a checkpoint saved with this callback.")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("attnlens", "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}.") from error
    if header.get("format") != _FORMAT or header.get("observers") != list(observers):
        raise InputError(
            f"{path} holds the state of {header.get('observers')}, format {header.get('format')}; "
            f"here are {list(observers)}, format {_FORMAT}. Use the observers it was saved with."
        )
    return state
