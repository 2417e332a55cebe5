"""Measurements of one thing each: they take a quarter of the free memory at most, and give it back."""
