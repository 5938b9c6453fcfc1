"""Scoring encoders: anything with `encode(list[str]) -> [n, D]` becomes named scores with their protocol.

Nothing here knows of Hydra, and of Lightning only `finetune`, which trains. `suite("sts").run(encoder, settings)` runs
a suite; its code is imported then.
"""

from embedlab.evaluation.core.suite import Suite, suite, suite_names

__all__ = ["Suite", "suite", "suite_names"]
