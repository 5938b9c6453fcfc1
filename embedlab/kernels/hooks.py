"""Whether somebody else looks at a module or runs it, so that its parts must not be run around it."""

from __future__ import annotations

from torch import nn

_COLLECTS = "transformers.utils.output_capturing"
"""Its hooks collect hidden states for the forward of transformers' models, and do nothing else."""


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any kind, or a forward of its own that is not its class's."""
    hooks = [
        hook
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        for hook in getattr(module, kind).values()
    ]
    return "forward" in vars(module) or any(getattr(h, "__module__", "") != _COLLECTS for h in hooks)
