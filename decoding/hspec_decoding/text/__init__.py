"""Text to tokens and back: tokenizers, chat templates, streaming with stop strings."""
