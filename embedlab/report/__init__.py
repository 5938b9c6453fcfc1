"""Figures and tables of checkpoints and results, for notebooks and reports."""
