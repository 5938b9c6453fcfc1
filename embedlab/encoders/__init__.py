"""Text to vectors: tokenization, encoders of one and of several towers, their folders, one way of loading."""
