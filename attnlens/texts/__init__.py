"""Models and tokenizers from a folder; texts read, tokenised and cut into batches."""
