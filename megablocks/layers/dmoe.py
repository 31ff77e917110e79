"""The dropless layer under the names of megablocks 0.10, built from `Arguments`; `megablocks.moe` computes it."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from megablocks.config import MoEConfig
from megablocks.layers import common, dmlp_registry, moe, mpu  # noqa: F401  (programs for 0.10 import them from here)
from megablocks.layers.arguments import Arguments
from megablocks.layers.mlp import GroupedMLP, SparseMLP, create_moe_expert_weights
from megablocks.moe import layer
from megablocks.moe.impls import BLOCKS
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.routing.dispatch import Dispatch, build_dispatch_op, pad_dispatch
from megablocks.ops.sparse.matrix import topology


class ParallelDroplessMLP(moe.ParallelMLP):
    """Like `ParallelMLP`, but no token is dropped: the capacity factor of `Arguments` is ignored, as in 0.10.

    Methods "sparse_…" are called with mlp_impl "sparse", methods "grouped_…" with all others, so that a program can
    override either. They are the same functions here. A program's own `mlp` gets the same arguments as in 0.10: rows
    and the number of rows per expert, or with mlp_impl "sparse" padded rows and their blocks, as stanford-stk's Matrix
    if that is installed.
    """

    def _config_of(self, args: Arguments) -> MoEConfig:
        return args.to_config().replace(capacity_factor=None)

    def _init_mlp(self, args: Arguments) -> SparseMLP:
        # 0.10 first makes a capacity layer's experts, then replaces them. We draw them too, so equal seeds agree.
        for init in (args.init_method, args.output_layer_init_method):
            create_moe_expert_weights(args, args.moe_num_experts, args.ffn_hidden_size, args.hidden_size, init)
        return dmlp_registry.get(args)

    def grouped_permute_and_compute(
        self, x: Tensor, tokens_per_expert: Tensor, indices: Tensor, bin_ids: Tensor, expert_weights: Tensor | None,
        bins: Tensor, expert_capactiy: int, top_k: int,
    ) -> Tensor:  # fmt: skip
        """x (..., H) of T tokens → (T, H) by all pairs. It ignores expert_capactiy (0.10's spelling).

        The arguments are those of `ParallelMLP.permute_and_compute`.
        """
        x = x.reshape(-1, x.shape[-1])
        expert = torch.empty_like(bin_ids).scatter_(0, indices.long(), bin_ids)
        token = torch.arange(indices.shape[0], dtype=torch.int32, device=x.device) // top_k
        dispatch = Dispatch(*build_dispatch_op(token, expert, x.shape[0], bins.shape[0]))
        if type(self.mlp).forward in (SparseMLP.forward, GroupedMLP.forward):
            return self.mlp(x, dispatch, expert_weights)
        shape: Any = tokens_per_expert  # a program's own experts, called as in 0.10
        if self.args.mlp_impl == "sparse":
            width, pairs = mpu.features_per_rank(self.args), indices.shape[0]
            block_size = next(size for size in BLOCKS if width % size == 0)
            shape, offsets = topology(dispatch.expert_offsets, width, max_rows=pairs, block_size=block_size)
            dispatch = pad_dispatch(dispatch, offsets, shape.shape[0])
            if importlib.util.find_spec("stk") is not None:
                shape = shape.to_stk()
        rows = self.mlp(gather(x, dispatch), shape)
        return combine(rows, expert_weights, dispatch, num_bits=self.config.quantize_scatter_num_bits)

    def permute_and_compute(
        self, x: Tensor, tokens_per_expert: Tensor, indices: Tensor, bin_ids: Tensor, expert_weights: Tensor | None,
        bins: Tensor, expert_capactiy: int, top_k: int,
    ) -> Tensor:  # fmt: skip
        """Like `grouped_permute_and_compute`, which it calls; with mlp_impl "sparse" it calls the "sparse_…" method."""
        sparse = self.args.mlp_impl == "sparse"
        compute = self.sparse_permute_and_compute if sparse else self.grouped_permute_and_compute
        return compute(x, tokens_per_expert, indices, bin_ids, expert_weights, bins, expert_capactiy, top_k)

    def forward_once(self, x: Tensor, expert_weights: Tensor, top_experts: Tensor) -> tuple[Tensor, Tensor]:
        """Like `ParallelMLP.forward_once`."""
        once = self.sparse_forward_once if self.args.mlp_impl == "sparse" else self.grouped_forward_once
        return once(x, expert_weights, top_experts)

    sparse_permute_and_compute = grouped_permute_and_compute
    grouped_forward_once = sparse_forward_once = moe.ParallelMLP.forward_once


class dMoE(moe.MoE):  # noqa: N801
    """megablocks 0.10's dropless layer, like `MoE`. `dMoE(config)` of a `MoEConfig` makes a `megablocks.moe.dMoE`."""

    _of_config = layer.dMoE

    def _init_experts_mlp(self, args: Arguments) -> ParallelDroplessMLP:
        return ParallelDroplessMLP(args)


dMoE.register(layer.dMoE)
