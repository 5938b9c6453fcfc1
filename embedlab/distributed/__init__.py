"""Ranks, and what they exchange: gathering with gradient, in-batch candidates."""
