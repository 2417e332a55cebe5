"""Where weights and KV go: sizes, plans, placement."""
