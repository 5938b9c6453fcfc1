"""Triton and fused operators, each with its plain form beside it, and what says which of them run."""
