"""The only part of attnlens that knows how Hugging Face models are built."""
