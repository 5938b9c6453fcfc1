"""What a training step is: the base of methods, step runners, optimiser, precision, sharding."""
