"""A tiny classification task and the Trainer that learns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from attnlens import HeadImportance, HeadStatistics
from attnlens.attention import LayerHealth, LayerStatistics, NormStatistics, ResidualMixing
from tests.support import models

TOKENS = 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Random sentences of 6 to 11 tokens, padded, in two classes."""

    def __init__(self, count: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 96, (count, TOKENS), generator=generator)
        self.labels = torch.randint(0, 2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(TOKENS) < 6 + index % 6).long()
        ids = self.ids[index].where(mask.bool(), 1)
        return {"input_ids": ids, "attention_mask": mask, "labels": self.labels[index]}

    def batch(self, *indices: int) -> dict[str, Tensor]:
        rows = [self[index] for index in indices or range(len(self))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def classifier(hidden_dropout: float = 0.1, attention_dropout: float = 0.1) -> PreTrainedModel:
    """A classifier with heads that differ; the same at every call."""
    config = hf.BertConfig(**models.TEXT)
    model = models.initialise(hf.BertForSequenceClassification, config)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = attention_dropout if "attention.self" in name else hidden_dropout
    return model.train()


def every_observer() -> tuple[Any, ...]:
    """Health, gates, norms and levels, with the gates in second place."""
    health = HeadStatistics(fields="health")
    others = LayerHealth(), LayerStatistics(), NormStatistics(), ResidualMixing()
    return (health, HeadImportance(), *others)


NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: Any = None,
    kind: type[Trainer] = Trainer,
    **arguments: Any,
) -> Trainer:
    """A Trainer of 24 sentences, 4 at a time: 6 steps an epoch, one epoch, no shuffling."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
    }
    return kind(
        classifier() if model is None else model,
        TrainingArguments(str(folder), **settings | arguments),
        train_dataset=Sentences(),
        eval_dataset=Sentences(10, seed=1),
        callbacks=list(callbacks),
    )


def losses(trained: Trainer) -> list[float]:
    """Every loss that was logged."""
    names = ("loss", "eval_loss", "train_loss")
    return [log[name] for log in trained.state.log_history for name in names if name in log]


def scalars(trained: Trainer) -> dict[int, dict[str, float]]:
    """What attnlens logged, by step."""
    found: dict[int, dict[str, float]] = {}
    for log in trained.state.log_history:
        own = {name: value for name, value in log.items() if "attnlens/" in name}
        if own:
            found.setdefault(log["step"], {}).update(own)
    return found
