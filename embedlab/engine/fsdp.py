"""Weights shared out over the devices (FSDP2), for decoders that do not fit one of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

from embedlab.distributed.gather import world_size
from embedlab.engine.step import backbones_of


class Sharded(ModelParallelStrategy):
    """Data parallel over all devices; a checkpoint is one whole file.

    Args:
        devices: of all machines.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Each rank reads the file and keeps its share (Lightning 2.6 fails at parts that are no block)."""
        checkpoint: dict[str, Any] = torch.load(
            checkpoint_path, map_location="cpu", weights_only=True, mmap=True
        )
        assert self.model is not None
        options = StateDictOptions(full_state_dict=True, strict=True)
        set_model_state_dict(self.model, checkpoint["state_dict"], options=options)
        for optimizer, state in zip(self.optimizers, checkpoint.get("optimizer_states", []), strict=False):
            named = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, self.model)
            set_optimizer_state_dict(self.model, optimizer, named, options=options)
        return checkpoint


def shard(method: nn.Module, mesh: Any, precision: str) -> None:
    """Share out a method's weights over ``mesh``, in place: block by block, then what is left of each part.

    Under bf16-mixed, weights are gathered and multiplied in bf16, and gradients added up in fp32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Also what is left of the backbone: after scoring, a checkpoint must find the shares.
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if precision == "bf16-mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for backbone in backbones_of(method):
        for block in backbone.blocks:
            fully_shard(block, **options)
        fully_shard(backbone, **options)
    encoder: Any = method.encoder
    for part in (encoder.pooling, *(child for child in method.children() if child is not encoder)):
        if any(True for _ in part.parameters()):
            fully_shard(part, **options)
    for p in method.parameters(recurse=False):  # numbers by themselves, which have no shares
        p.register_hook(_mean_over_ranks)


def _mean_over_ranks(grad: Tensor) -> Tensor:
    mean = grad.clone()
    dist.all_reduce(mean)
    return mean / world_size()


def sharded(method: nn.Module) -> bool:
    return getattr(method, "_device_mesh", None) is not None


def whole(x: Tensor) -> Tensor:
    """A tensor that is shared out over devices, as a whole; any other as it is."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]
