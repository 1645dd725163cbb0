"""Which attention heads waste most of their attention? The ten-line example."""

from transformers import AutoModel, AutoTokenizer

from attnlens import Lens
from attnlens.demo import model_folder, paragraphs

name = model_folder()  # or any encoder: "bert-base-uncased", a local folder, …
model, tokenizer = AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
batch = tokenizer(paragraphs(), padding=True, return_tensors="pt")

with Lens(model) as lens:
    model(**batch)

print(lens.summary())  # effective fraction of every head, layer × head
