"""Training text held against evaluation sets: what overlaps, and counts of it."""
