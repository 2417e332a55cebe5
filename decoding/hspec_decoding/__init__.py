"""Models, KV views, levels, verification and the engine."""
