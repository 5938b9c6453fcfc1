"""What a run does besides its steps: one concern a file."""
