"""Experts under the names of megablocks 0.10, built from `Arguments`; `megablocks.moe.experts` computes them.

    MLP                     (E, C, H) → the same: every expert has the same number of places
    SparseMLP, SparseGLU    each expert's rows padded to whole blocks, and the pattern of hidden blocks (glu.py: gated)
    GroupedMLP, GroupedGLU  rows sorted by expert, and the number of rows of each expert
    SharedMLP, SharedGLU    the shared expert, which computes every token

Legend: E experts of this rank, C places, H hidden, I width of an expert here, R rows, T tokens. Parameters have 0.10's
names and shapes: w1, v1, w2 (E·I, H), but in MLP w1, v1 (E, H, I) and w2 (E, I, H). A parameter can be replaced by a
DTensor; then its local part is used. The sparse and grouped classes also accept the arguments of `Experts`, with a
Dispatch as the second one. The layers call them so, because every mlp_impl can compute it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megablocks.config import MoEConfig
from megablocks.layers import mpu
from megablocks.layers.arguments import Arguments, InitFn, activation_of
from megablocks.moe.experts import Experts, scale_gradient, without_autocast
from megablocks.moe.experts import local_part as resolve_dtensor
from megablocks.moe.impls import sparse_products
from megablocks.moe.shared_expert import SharedExpert
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.fused.mlp import ExpertParameters
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.sparse.matrix import Matrix
from megablocks.ops.sparse.mlp import sparse_mlp
from megablocks.ops.upstream import function_class

ScaleGradient = function_class("ScaleGradient", scale_gradient)


def create_moe_expert_weights(
    args: Arguments, num_experts: int, ffn_hidden_size: int, hidden_size: int, init_method: InitFn
) -> Tensor:
    """Return this rank's part of a new matrix (E, I, H) of all experts, which init_method fills.

    As in 0.10, every rank temporarily draws all experts. So a seed gives the same experts on any number of ranks.
    """
    weights = torch.empty(num_experts, ffn_hidden_size, hidden_size, device=args.resolve_device(), dtype=args.dtype)
    init_method(weights)
    shard = mpu.expert_shard(args)
    mine = weights.narrow(0, shard.expert_offset, shard.num_local_experts)
    return mine.chunk(shard.ffn_size, dim=1)[shard.ffn_rank]


def create_dmoe_expert_weights(
    args: Arguments, num_experts: int, rows: int, columns: int, init_method: InitFn
) -> Tensor:
    """Like `create_moe_expert_weights`, but return one matrix (E·rows, columns)."""
    return create_moe_expert_weights(args, num_experts, rows, columns, init_method).reshape(-1, columns)


class _ArgumentsExperts(Experts):
    """The experts of this rank, from `Arguments`: initialized, marked and scaled as in 0.10."""

    def __init__(self, args: Arguments, config: MoEConfig) -> None:
        self.args = args  # first, because the base class initializes the parameters
        ranks = mpu.get_expert_parallel_world_size(args)
        self.gradient_scale = 1 / ranks if args.moe_expert_model_parallelism else None
        super().__init__(config, shard=mpu.expert_shard(args), device=args.resolve_device(), dtype=args.dtype)
        v1 = self.v1
        del self.v1  # as in 0.10, only gated experts have it
        if v1 is not None:
            self.v1 = v1  # last, as in 0.10: an optimizer numbers its states by this order
        # for subclasses that add matrices, as 0.10's gated classes do
        self._num_rows_per_rank = self.w1.shape[0]
        self._should_set_parallelism_attribute = args.moe_expert_model_parallelism

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize w1, w2 and v1 again, in this order, from torch's generator."""
        args = dataclasses.replace(self.args, device=self.w1.device)
        size = args.moe_num_experts, args.ffn_hidden_size, args.hidden_size
        inits = {"w1": args.init_method, "w2": args.output_layer_init_method, "v1": args.init_method}
        for name, init in inits.items():
            weight = getattr(self, name, None)
            if weight is not None:
                self._per_expert(weight, name == "w2").copy_(create_moe_expert_weights(args, *size, init))

    def scale_grad(self, w: Tensor) -> Tensor:
        """Return w unchanged; its gradient is multiplied by `gradient_scale`, if that is a number."""
        return w if self.gradient_scale is None else scale_gradient(w, self.gradient_scale)

    def _per_expert(self, weight: Tensor, is_w2: bool = False) -> Tensor:
        return super()._per_expert(self.scale_grad(weight))


class MLP(_ArgumentsExperts):
    """Experts that all have the same number of places. mlp_type "glu" makes them gated; 0.10 ignores it here."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args, args.to_config())
        for name, weight in list(self.named_parameters()):
            stored = self._per_expert(weight)
            stored = stored if name == "w2" else stored.transpose(1, 2)
            setattr(self, name, nn.Parameter(stored.detach().contiguous()))
        self.mark(args.moe_expert_model_parallelism)

    def _per_expert(self, weight: Tensor, is_w2: bool = False) -> Tensor:
        if weight.dim() == 2:  # as the base class creates them
            return super()._per_expert(weight)
        local = resolve_dtensor(self.scale_grad(weight))
        return local if is_w2 else local.transpose(1, 2)

    def _accept_old_layouts(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Convert any layout that `Experts` accepts to the layout of this class."""
        super()._accept_old_layouts(state, prefix, *rest)
        flat = (self.num_local_experts * self.ffn_hidden_size, self.config.hidden_size)
        for name, _ in self.named_parameters():
            weight = state.get(prefix + name)
            if weight is not None and weight.shape == flat:
                stored = super()._per_expert(weight)
                state[prefix + name] = stored if name == "w2" else stored.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """x (E, C, H) → (E, C, H)."""
        return self.forward_padded(x)


class SparseMLP(_ArgumentsExperts):
    """Experts by block-sparse products."""

    _gated: ClassVar[bool] = False
    _grouped: ClassVar[bool] = False

    def __init__(self, args: Arguments) -> None:
        impl = "sparse" if not self._grouped else "grouped" if args.mlp_impl == "sparse" else args.mlp_impl
        super().__init__(
            args, dataclasses.replace(args, mlp_type="glu" if self._gated else "mlp", mlp_impl=impl).to_config()
        )
        self.mark(args.moe_expert_model_parallelism)

    def forward(self, x: Tensor, topo: Any, weight: Tensor | None = None, *, places: int | None = None) -> Tensor:
        """Compute rows of experts that are padded to whole blocks.

        Args:
            x: (M, H).
            topo: the hidden blocks (M, E·I) without values: a `megablocks.ops.sparse.Matrix`, or stanford-stk's, which
                is checked on the host. Or a Dispatch, as in `Experts`: x (T, H), weight (R,) → (T, H).
            weight, places: only with a Dispatch.

        Returns:
            (M, H).
        """
        if isinstance(topo, Dispatch):
            return super().forward(x, topo, weight, places=places)
        x = self._checked(x)
        with without_autocast(x):
            return self._multiply_blocks(x, self._parameters_in(x.dtype), _pattern(topo))

    def _multiply_blocks(self, x: Tensor, weights: ExpertParameters, pattern: Matrix) -> Tensor:
        return sparse_products(weights, self.config)(x, pattern=pattern)


class _Grouped:
    """The forward of grouped experts. List it before `Experts` in a class's bases."""

    _grouped: ClassVar[bool] = True

    def forward(
        self: Any, x: Tensor, tokens_per_expert: Any, weight: Tensor | None = None, *, places: int | None = None
    ) -> Tensor:
        """Compute rows that are sorted by expert.

        Args:
            x: (R, H).
            tokens_per_expert: (E,) integer on any device, adding up to R. Or a Dispatch, as in `Experts`: x (T, H),
                weight (R,) → (T, H).
            weight, places: only with a Dispatch.

        Returns:
            (R, H).

        Raises:
            ValueError: tokens_per_expert of another shape.
        """
        if isinstance(tokens_per_expert, Dispatch):
            return Experts.forward(self, x, tokens_per_expert, weight, places=places)
        if tokens_per_expert.shape != (self.num_local_experts,):
            raise ValueError(
                f"tokens_per_expert is {tuple(tokens_per_expert.shape)}: must be ({self.num_local_experts},)"
            )
        return self._multiply_rows(x, offsets_of(tokens_per_expert, x.device))

    def _multiply_rows(self: Any, x: Tensor, offsets: Tensor) -> Tensor:
        return self.forward_sorted(x, offsets)


class GroupedMLP(_Grouped, SparseMLP):
    """Experts by grouped GEMMs."""


def _pattern(topo: Any) -> Matrix:
    """Return the hidden blocks without values, from our Matrix or stanford-stk's."""
    return (topo if isinstance(topo, Matrix) else Matrix.from_stk(topo)).with_data(None)


def offsets_of(counts: Tensor, device: torch.device) -> Tensor:
    """Row counts (E,) of the experts, integer on any device → (E+1,) int32: each expert's first row, and the total."""
    return F.pad(counts.to(device).cumsum(0), (1, 0)).int()


def memory_optimized_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, topo: Any, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """Compute act(x·w1ᵀ)·w2 at the blocks of `topo`. Only the pre-activation is saved for backward.

    Args:
        x: (M, H). w1, w2: (E·I, H). topo: as in `SparseMLP`. activation_fn: as in `Arguments`.

    Returns:
        (M, H).
    """
    return sparse_mlp(x, w1.t(), w2, _pattern(topo), activation=activation_of(activation_fn), recompute=True)


def memory_optimized_grouped_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, batch_sizes: Tensor, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """Compute act(x·w1ᵀ)·w2 of rows sorted by expert. Only the pre-activation is saved for backward.

    Args:
        x: (R, H). w1, w2: (E, I, H). batch_sizes: (E,) integer on any device. activation_fn: as in `Arguments`.

    Returns:
        (R, H).
    """
    offsets = offsets_of(batch_sizes, x.device)
    pre = grouped_mm(x, w1.transpose(1, 2), offsets)
    return activate_and_project(pre, None, w2, offsets, activation_of(activation_fn))


MemoryOptimizedMLP = function_class("MemoryOptimizedMLP", memory_optimized_mlp)
MemoryOptimizedGroupedMLP = function_class("MemoryOptimizedGroupedMLP", memory_optimized_grouped_mlp)


class SharedMLP(SharedExpert):
    """The shared expert from `Arguments`: up_proj, down_proj, and in SharedGLU gate_proj, of class fc_cls."""

    _gated: ClassVar[bool] = False

    def __init__(self, args: Arguments) -> None:
        shared = dataclasses.replace(args, shared_expert=True, mlp_type="glu" if self._gated else "mlp")
        kwargs = {"bias": args.bias, "device": args.resolve_device(), **args.fc_kwargs}
        if args.fc_cls is nn.Linear:
            kwargs.setdefault("dtype", args.dtype)
        super().__init__(shared.to_config(), linear=args.fc_cls, linear_kwargs=kwargs)
        # forward does not need these; subclasses that add layers do
        self.args, self.fc_kwargs, self.act = args, kwargs, args.activation_fn
        self.down_proj._is_residual = True  # type: ignore[assignment]  # llm-foundry's initializers look for it

    def add_experts_sharedexpert(self, shared_expert_out: Tensor, expert_out: Tensor) -> Tensor:
        """shared_expert_out + expert_out, both (..., H); with shared_expert_weighted_sum the mean of K + 1 experts."""
        if not self.args.shared_expert_weighted_sum:
            return shared_expert_out + expert_out
        top_k = self.args.moe_top_k
        return shared_expert_out / (top_k + 1) + expert_out * (top_k / (top_k + 1))
