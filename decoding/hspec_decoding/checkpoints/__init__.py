"""Where weights come from: aliases, hub, cache, GGUF and .bin files, and a checkpoint in place."""
