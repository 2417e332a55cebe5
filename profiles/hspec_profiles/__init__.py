"""Host measurements and what everything above raises."""
