"""Fine-tuned evaluations: a head on a copy of the encoder's backbone, trained on one task and scored.

Unlike the rest of `embedlab.evaluation` these train, so they use Lightning. The encoder itself is not changed.
"""
