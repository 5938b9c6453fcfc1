"""Encoders in the formats of other libraries."""
