"""FSDP2 over the segments of a model."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

from seg4k.models.vit_unet import ViTUNet
from seg4k.training.module import SegmentationModule


class ShardedSegmentationModule(SegmentationModule):
    """`SegmentationModule` whose model is sharded once the processes know each other.

    Attributes:
        sharding: the `strategy` group of the configuration.
    """

    sharding: Mapping[str, Any]
    _is_sharded = False

    def numbered(self, states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """They are so by now."""
        return states

    def configure_model(self) -> None:
        """Shard, once; Lightning calls it before training and before validation."""
        if not self._is_sharded:
            self._is_sharded = True
            assert self.device_mesh is not None
            shard(
                self.model,
                self.device_mesh["data_parallel"],
                reshard_after_forward=self.sharding["reshard_after_forward"],
                cpu_offload=self.sharding["cpu_offload"],
            )


def shard(
    model: ViTUNet, mesh: DeviceMesh, *, reshard_after_forward: bool = True, cpu_offload: bool = False
) -> None:
    """Shard each top-level segment by itself, and what is left (the head, a prefix token) with the whole.

    Activation checkpointing and compilation come before: they lie inside a segment, and it is gathered once
    for all that runs in it. The head belongs to the whole: the loss calls it strip by strip, outside of
    `forward`, while what belongs to the whole stays gathered from `forward_features` until backward is done.

    Args:
        model: the segmenter, not yet sharded.
        mesh: one-dimensional.
        reshard_after_forward: whether a segment is let go of after its forward pass and gathered again for
            backward.
        cpu_offload: whether shards lie in host memory.
    """
    policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for name, module in top_level(model).items():
        if name != "head" and next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, offload_policy=policy)
    register_fsdp_forward_method(model, "forward_features")


def top_level(model: ViTUNet) -> dict[str, nn.Module]:
    """The segments that lie in no other."""
    segments = model.segments()
    return {
        name: module
        for name, module in segments.items()
        if not any(name.startswith(f"{other}.") for other in segments)
    }
