"""Watch heads change while a sentence encoder learns to tell genres apart.

    python examples/fine_tune.py                         # a small built-in task
    python examples/fine_tune.py TRAIN.jsonl DEV.jsonl   # one {"text": …, "genre": …} a line

300 steps take about three minutes on two cores. The curves of every layer are in the folder of
`--logs`, for `tensorboard --logdir`. Needs: pip install "attnlens[demo]" accelerate tensorboard
"""

import argparse
import random
from pathlib import Path

import torch
from genres import read_passages, write_passages
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    logging,
)
from transformers.trainer_callback import PrinterCallback

from attnlens import HeadImportance, HeadStatistics, LensCallback
from attnlens.demo import model_folder

TOKENS, BATCH = 96, 8


class Task(torch.utils.data.Dataset):
    """Passages, longer than a head is wide, and the index of their genre."""

    def __init__(self, passages, genres, tokenizer):
        texts = [passage.text for passage in passages]
        self.tokens = tokenizer(texts, truncation=True, max_length=TOKENS)
        self.labels = [genres.index(passage.genre) for passage in passages]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        tokens = {name: rows[index] for name, rows in self.tokens.items()}
        return {**tokens, "labels": self.labels[index]}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("train", nargs="?", type=Path, help="JSONL with text and genre")
parser.add_argument("dev", nargs="?", type=Path, help="JSONL with text and genre")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--logs", type=Path, default=Path("runs/fine_tune"), help="TensorBoard files")
options = parser.parse_args()
logging.set_verbosity_error()
logging.disable_progress_bar()
torch.manual_seed(0)

if options.train and options.dev:
    train, dev = read_passages(options.train), read_passages(options.dev)
    dev = random.Random(0).sample(dev, min(200, len(dev)))
else:
    train, dev = write_passages(480, 0), write_passages(80, 1)
genres = sorted({passage.genre for passage in train})
name = model_folder()  # or any encoder: "bert-base-uncased", a local folder, …
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=len(genres))
tokenizer = AutoTokenizer.from_pretrained(name)

logged = max(options.steps // 6, 1)
callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=max(logged // 5, 1))
arguments = TrainingArguments(
    str(options.logs),
    max_steps=options.steps,
    per_device_train_batch_size=BATCH,
    learning_rate=1e-4,
    logging_steps=logged,
    report_to="tensorboard",
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)


def accuracy(prediction):
    """The share of passages whose genre is right."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


trainer = Trainer(
    model,
    arguments,
    train_dataset=Task(train, genres, tokenizer),
    eval_dataset=Task(dev, genres, tokenizer),
    processing_class=tokenizer,
    compute_metrics=accuracy,
    callbacks=[callback],
)
trainer.remove_callback(PrinterCallback)  # its scalars are in TensorBoard and summed up below
trainer.train()

history = [row for row in trainer.state.log_history if "attnlens/entropy/layer_00/mean" in row]
print("\nlayer means while training: first and last value logged")
print("layer  effective fraction         entropy             importance")
for layer in range(model.config.num_hidden_layers):
    line = f"{layer:>5}"
    for quantity, digits in (
        ("effective_fraction", ".3f"),
        ("entropy", ".3f"),
        ("importance", ".1e"),
    ):
        first, last = (
            row[f"attnlens/{quantity}/layer_{layer:02}/mean"] for row in (history[0], history[-1])
        )
        line += f"  {first:>7{digits}} → {last:<7{digits}}  "
    print(line)
importance = callback.observers[1].compute().importance
row, head = divmod(int(importance.argmax()), importance.shape[1])
print(f"\nThe loss depended most on head {head} of layer {row}.")
print(f"accuracy on {len(dev)} passages: {trainer.evaluate()['eval_accuracy']:.3f}")
print(f"tensorboard --logdir {options.logs}")
