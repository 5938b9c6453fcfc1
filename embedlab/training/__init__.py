"""The plumbing of a run: steps, schedules, resume, scoring while training."""
