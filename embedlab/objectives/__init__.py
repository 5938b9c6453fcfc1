"""Training objectives: pure functions of tensors, in fp32, without distributed calls."""
