"""Watch heads change while a sentence encoder learns to tell recipes from news."""

import tempfile

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    logging,
)

from attnlens import HeadImportance, HeadStatistics, LensCallback
from attnlens.demo import model_folder

logging.set_verbosity_error()

RECIPES = [
    "Whisk the eggs with sugar until the mixture turns pale and thick.",
    "Simmer the lentils for twenty minutes, then stir in the lemon juice.",
    "Fold the flour into the batter without knocking out the air.",
    "Slice the onions thinly and fry them in butter until golden.",
    "Let the dough rest under a damp cloth for one hour.",
    "Season the soup with salt, pepper and a spoon of vinegar.",
    "Roast the carrots on a hot tray until their edges brown.",
    "Melt the chocolate gently over water and keep stirring.",
]
REPORTS = [
    "The council voted on Tuesday to close the bridge for repairs.",
    "Heavy rain delayed the morning trains between the two cities.",
    "The committee will publish its findings before the end of May.",
    "Fishermen on the north coast report the largest catch in years.",
    "A spokesman declined to say when the museum would reopen.",
    "Prices of copper rose for the third week in a row.",
    "The court dismissed the appeal and ordered a new inquiry.",
    "Two hundred volunteers cleared the river after the flood.",
]


class Paragraphs(torch.utils.data.Dataset):
    """Paragraphs of four sentences of either kind, longer than a head is wide."""

    def __init__(self, tokenizer):
        paragraphs = []
        for first in range(8):
            for kind in (RECIPES, REPORTS):
                paragraphs.append(" ".join((kind + kind)[first : first + 4]))
        self.tokens = tokenizer(paragraphs, padding=True, return_tensors="pt")

    def __len__(self):
        return len(self.tokens["input_ids"])

    def __getitem__(self, index):
        row = {name: tensor[index] for name, tensor in self.tokens.items()}
        return {**row, "labels": index % 2}


torch.manual_seed(0)
name = model_folder()  # or any encoder: "bert-base-uncased", a local folder, …
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
data = Paragraphs(AutoTokenizer.from_pretrained(name))

callback = LensCallback([HeadStatistics(), HeadImportance()], every_n_steps=4)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,  # with report_to="tensorboard", the curves are here
        num_train_epochs=5,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()

statistics, importance = (observer.compute() for observer in callback.observers)
print("\nmean of each layer over the training")
print("layer  effective fraction  entropy  importance")
for layer in range(len(statistics.layers)):
    print(
        f"{layer:>5}  {statistics.effective_fraction[layer].mean():>18.3f}"
        f"  {statistics.entropy[layer].mean():>7.3f}  {importance.importance[layer].mean():>10.2e}"
    )
row, head = divmod(int(importance.importance.argmax()), importance.importance.shape[1])
print(f"\nThe loss depended most on head {head} of layer {row}.")
