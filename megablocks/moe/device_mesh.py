"""Make the experts' parameters DTensors: torch's FSDP2, optimizers and checkpoints then know what each rank holds.

The layers compute each rank's part. A gradient is a DTensor with the parameter's placements. No layer reduces gradients
over ranks that hold the same part. A wrapper averages them, as it does for plain parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megablocks.moe.groups import ExpertShard


def as_dtensors(experts: nn.Module, shard: ExpertShard, mesh: DeviceMesh) -> None:
    """Replace each parameter by a DTensor of all experts. This rank holds a block of its rows. Nothing is copied.

    Args:
        experts: the experts of this rank; their matrices are (E_local·I, H), their biases (E_local, …).
        shard: what this rank holds.
        mesh: has one dimension; the ranks are in the order of their experts.

    Raises:
        ValueError: each expert's width is split, which blocks of rows cannot describe.
    """
    from torch.distributed.tensor import DTensor, Shard

    if shard.ffn_size > 1:
        ranks, most = mesh.size(), mesh.size() // shard.ffn_size
        raise ValueError(f"expert_mesh: has {ranks} ranks, must have at most one per expert, {most}")
    for name, parameter in list(experts.named_parameters(recurse=False)):
        whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        distributed = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        vars(distributed).update(vars(parameter))  # marks, such as expert_model_parallel
        setattr(experts, name, distributed)


@torch.no_grad()
def copy_rows(weight: Tensor, first: int, rows: Tensor) -> None:
    """Copy `rows` (N, H) to rows [first, first + N) of `weight` (M, H). In a DTensor only this rank's rows are written.

    Raises:
        ValueError: this rank holds parts of rows.
    """
    if not hasattr(weight, "to_local"):
        weight[first : first + rows.shape[0]] = rows
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    if any(placement.is_shard() and not placement.is_shard(0) for placement in placements):
        raise ValueError(f"placements={placements}: must split rows only, or split after the initialization")
    # FSDP2 splits between any two rows, and not in rank order. So the row numbers are split in the same way.
    every = DTensor.from_local(
        torch.arange(weight.shape[0], device=rows.device) - first, mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    row = every.redistribute(placements=placements).to_local()
    here = (row >= 0) & (row < rows.shape[0])
    weight.to_local()[here] = rows[row[here]].to(weight.dtype)
