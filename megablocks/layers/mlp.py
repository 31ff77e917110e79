"""Experts by the names of megablocks 0.10, built from `Arguments`; what they compute is in `megablocks.layers.experts`.

    MLP                     (E, C, H) → the same: as many places for every expert
    SparseMLP, SparseGLU    rows padded to whole blocks an expert, and the pattern of the hidden blocks (glu.py: gated)
    GroupedMLP, GroupedGLU  rows sorted by expert, and how many each has
    SharedMLP, SharedGLU    the expert of every token

Legend: E experts of this rank, C places, H hidden, I width of an expert here, R rows, T tokens. Parameters have 0.10's
names and shapes: w1, v1, w2 (E·I, H), but in MLP w1, v1 (E, H, I) and w2 (E, I, H). Each class is an `Experts` too and
takes that one's call, a Dispatch in the second place: with it the layers use every faster way through.
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
from megablocks.layers.arguments import Arguments, activation_of
from megablocks.layers.expert_mlp import ExpertWeights
from megablocks.layers.experts import Experts
from megablocks.layers.shared_expert import SharedExpert
from megablocks.ops.fused.down import activate_and_project
from megablocks.ops.grouped.grouped_mm import grouped_mm
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.ops.sparse.matrix import Matrix
from megablocks.ops.sparse.mlp import sparse_mlp


class _ArgumentsExperts(Experts):
    """The experts of this rank by `Arguments`, drawn by its init methods and marked as in 0.10."""

    def __init__(self, args: Arguments, config: MoEConfig) -> None:
        shard = mpu.expert_shard(args)
        super().__init__(
            config,
            num_local_experts=shard.num_local_experts,
            expert_offset=shard.expert_offset,
            ffn_shard=(shard.ffn_rank, shard.ffn_size),
            init_method=args.init_method,
            output_init_method=args.output_layer_init_method,
            grad_scale=1 / mpu.get_expert_parallel_world_size(args),
            device=args.resolve_device(),
            dtype=args.dtype,
        )
        self.args = args

    def _mark(self) -> None:
        for parameter in self.parameters():
            mpu.set_expert_model_parallel_attributes(parameter, self.args.moe_expert_model_parallelism)


class MLP(_ArgumentsExperts):
    """Experts with the same number of places each; gated with mlp_type "glu", which 0.10 ignores here."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args, args.to_config())
        for name, weight in self._matrices():
            stored = self._per_expert(weight)
            stored = stored if name == "w2" else stored.transpose(1, 2)
            setattr(self, name, nn.Parameter(stored.detach().contiguous()))
        self._mark()

    def _matrices(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, weight) for name, weight in self.named_parameters() if name in ("w1", "v1", "w2")]

    def _per_expert(self, weight: Tensor) -> Tensor:
        if weight.dim() == 2:  # as the base class makes them
            return super()._per_expert(weight)
        if weight is self.w2:
            return weight
        assert weight is self.w1 or weight is self.v1
        return weight.transpose(1, 2)

    def _accept_old_layouts(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """From any layout that `Experts` takes to this one."""
        super()._accept_old_layouts(state, prefix, *rest)
        flat = (self.num_local_experts * self.ffn_hidden_size, self.config.hidden_size)
        for name, _ in self._matrices():
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
        self._mark()

    def forward(self, x: Tensor, topo: Any, weight: Tensor | None = None) -> Tensor:
        """Rows of experts padded to whole blocks.

        Args:
            x: (M, H).
            topo: the hidden blocks (M, E·I), values ignored: `megablocks.ops.sparse.Matrix` or stanford-stk's, which is
                checked on the host. Or a Dispatch, for the call of `Experts`: x (T, H), weight (R,) → (T, H).

        Returns:
            (M, H).

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        if isinstance(topo, Dispatch):
            return super().forward(x, topo, weight)
        x = self._prepare(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._multiply_blocks(x, self._weights(x.dtype), _pattern(topo))

    def _multiply_blocks(self, x: Tensor, weights: ExpertWeights, pattern: Matrix) -> Tensor:
        return sparse_mlp(
            x,
            weights.w1.flatten(0, 1).t(),
            weights.w2.flatten(0, 1),
            pattern,
            v1=None if weights.v1 is None else weights.v1.flatten(0, 1).t(),
            activation=self.config.activation,
            approximate=self.config.gelu_approximate,
            recompute=self.config.recompute_activation,
            input_bits=self.config.quantize_inputs_num_bits,
            pre_bits=self.config.quantize_rematerialize_num_bits,
        )


class _Grouped:
    """The call of grouped experts; stands before an `Experts` in the bases."""

    _grouped: ClassVar[bool] = True

    def forward(self: Any, x: Tensor, tokens_per_expert: Any, weight: Tensor | None = None) -> Tensor:
        """Rows sorted by expert.

        Args:
            x: (R, H).
            tokens_per_expert: (E,) integer on any device, adding up to R. Or a Dispatch, for the call of `Experts`:
                x (T, H), weight (R,) → (T, H).

        Returns:
            (R, H).

        Raises:
            ValueError: shapes or dtypes that do not fit.
        """
        if isinstance(tokens_per_expert, Dispatch):
            return Experts.forward(self, x, tokens_per_expert, weight)
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
    return (topo if isinstance(topo, Matrix) else Matrix.from_stk(topo)).with_data(None)


def offsets_of(counts: Tensor, device: torch.device) -> Tensor:
    """(E,) rows an expert, on any device → (E+1,) int32, the first row of each and how many there are."""
    return F.pad(counts.to(device).cumsum(0), (1, 0)).int()


def memory_optimized_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, topo: Any, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """act(x·w1ᵀ)·w2 at the blocks of `topo`, keeping the pre-activation only for backward.

    Args:
        x: (M, H). w1, w2: (E·I, H). topo: as in `SparseMLP`. activation_fn: as in `Arguments`.

    Returns:
        (M, H).
    """
    name, approximate = activation_of(activation_fn)
    return sparse_mlp(x, w1.t(), w2, _pattern(topo), activation=name, approximate=approximate, recompute=True)


def memory_optimized_grouped_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, batch_sizes: Tensor, activation_fn: Callable[..., Tensor] | str
) -> Tensor:
    """act(x·w1ᵀ)·w2 of rows sorted by expert, keeping the pre-activation only for backward.

    Args:
        x: (R, H). w1, w2: (E, I, H). batch_sizes: (E,) integer on any device. activation_fn: as in `Arguments`.

    Returns:
        (R, H).
    """
    name, approximate = activation_of(activation_fn)
    offsets = offsets_of(batch_sizes, x.device)
    return activate_and_project(grouped_mm(x, w1.transpose(1, 2), offsets), None, w2, offsets, name, approximate)


class MemoryOptimizedMLP:
    """0.10's autograd function, of which `apply` is called; see `memory_optimized_mlp`."""

    apply = staticmethod(memory_optimized_mlp)


class MemoryOptimizedGroupedMLP:
    """0.10's autograd function, of which `apply` is called; see `memory_optimized_grouped_mlp`."""

    apply = staticmethod(memory_optimized_grouped_mlp)


class SharedMLP(SharedExpert):
    """The shared expert by `Arguments`: up_proj, down_proj, and with SharedGLU gate_proj, of class fc_cls."""

    _gated: ClassVar[bool] = False

    def __init__(self, args: Arguments) -> None:
        shared = dataclasses.replace(args, shared_expert=True, mlp_type="glu" if self._gated else "mlp")
        super().__init__(
            shared.to_config(),
            bias=args.bias,
            linear=args.fc_cls,
            linear_kwargs=args.fc_kwargs,
            device=args.resolve_device(),
            dtype=args.dtype,
        )
        self.args = args
        self.down_proj._is_residual = True  # type: ignore[assignment]  # by which llm-foundry's initialisers find it

    def add_experts_sharedexpert(self, shared_expert_out: Tensor, expert_out: Tensor) -> Tensor:
        """shared + experts, or with shared_expert_weighted_sum their mean over the K + 1 experts of a token."""
        if not self.args.shared_expert_weighted_sum:
            return shared_expert_out + expert_out
        top_k = self.args.moe_top_k
        return shared_expert_out / (top_k + 1) + expert_out * (top_k / (top_k + 1))
