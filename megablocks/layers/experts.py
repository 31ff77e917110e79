"""The experts of one rank: their parameters, and the MLP over rows that are sorted by expert.

    y[p] = w2_eᵀ · act(w1_e · x[p] + b1_e) + b2_e                                    e = expert of row p
    gated:  act(w1_e · x[p] + b1_e) ⊙ (v1_e · x[p] + c1_e)  in place of act(…)

Legend: T tokens, R rows (pairs), H hidden, I expert width here, E local experts.
Parameters have the layout of megablocks 0.10: w1, v1, w2 are (E·I, H), so expert e owns rows [e·I, (e+1)·I).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megablocks.config import MoEConfig, check_sparse_width
from megablocks.layers import mlp_choice
from megablocks.layers.ahead import Ahead, leaf
from megablocks.layers.common import cast_if_autocast_enabled, without_autocast
from megablocks.layers.expert_mlp import (
    ExpertWeights,
    batched_mlp,
    fused_experts,
    grouped_mlp,
    reference_mlp,
    sorted_dispatch,
    sparse_experts,
)
from megablocks.layers.main_grad import main_grad_of, to_main_grad
from megablocks.layers.scatter_mlp import scatter_mlp
from megablocks.ops.dtypes import accumulation_dtype
from megablocks.ops.launch import can_compile_ahead, hash_triton, is_compiling_ahead
from megablocks.ops.permute.combine import combine
from megablocks.ops.permute.gather import gather
from megablocks.ops.quant.saved import OFF
from megablocks.ops.routing.dispatch import Dispatch
from megablocks.parallel.all_to_all import scale_gradient

logger = logging.getLogger(__name__)
# Implementations that gather tokens and weigh and sum rows themselves.
_WHOLE: dict[str, Callable[..., Tensor]] = {"scatter": scatter_mlp, "fused": fused_experts}
_logged: set[str] = set()

InitFn = Callable[[Tensor], Any]


def _log_once(message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.info(message)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw under `seed` on `device` and leave every generator as it was."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


def _seed_of(seed: int, expert: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{expert}".encode(), digest_size=8).digest(), "little") >> 1


class Experts(nn.Module):
    """MLP experts [expert_offset, expert_offset + num_local_experts) of a layer, allocated once at their local size.

    Args:
        config: the layer; its activation, mlp_bias, mlp_impl, recompute_activation and init stds are used here.
            mlp_impl "sparse" needs a width here of a multiple of 64 (ConfigError otherwise).
        num_local_experts: experts held here; default all of them.
        expert_offset: global index of the first one.
        ffn_shard: (rank, size): which slice of every expert's width is held here. With size > 1 the outputs are partial
            sums that the caller adds up; b2 is added on shard rank 0 only.
        init_method, output_init_method: fill an expert's (ffn_hidden_size, H) w1/v1, or w2, in place; default a normal
            of std init_std, or output_init_std.
        seed: every expert is drawn in full, in float32, under a seed made from this and its global index, so that any
            spread over ranks draws equal weights. Default: one draw from torch's CPU generator (the same on every rank
            that was seeded alike).
        grad_scale: factor on the parameters' gradients; see `megablocks.parallel.dispatcher` for when it is 1/ranks.
        device, dtype: of the parameters; torch's defaults if None.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        num_local_experts: int | None = None,
        expert_offset: int = 0,
        ffn_shard: tuple[int, int] = (0, 1),
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        seed: int | None = None,
        grad_scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_local_experts = config.num_experts if num_local_experts is None else num_local_experts
        self.expert_offset = expert_offset
        self.ffn_shard = ffn_shard
        self.grad_scale = grad_scale
        if expert_offset < 0 or expert_offset + self.num_local_experts > config.num_experts:
            raise ValueError(
                f"expert_offset={expert_offset}, num_local_experts={self.num_local_experts}: "
                f"must lie within num_experts={config.num_experts}"
            )
        shard_rank, shards = ffn_shard
        if not 0 <= shard_rank < shards or config.ffn_hidden_size % shards:
            raise ValueError(
                f"ffn_shard={ffn_shard}: must be (rank, size) with 0 <= rank < size, "
                f"and size must divide ffn_hidden_size={config.ffn_hidden_size}"
            )
        self.ffn_hidden_size = config.ffn_hidden_size // shards
        self._ahead = Ahead(config, self.num_local_experts, self.ffn_hidden_size)
        if config.mlp_impl == "sparse":
            check_sparse_width(config.ffn_hidden_size, shards)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = self.num_local_experts * self.ffn_hidden_size
        self.w1 = parameter(rows, config.hidden_size)
        self.v1 = parameter(rows, config.hidden_size) if config.is_gated else None
        self.w2 = parameter(rows, config.hidden_size)
        bias, gated_bias = config.mlp_bias, config.mlp_bias and config.is_gated
        self.b1 = parameter(self.num_local_experts, self.ffn_hidden_size) if bias else None
        self.c1 = parameter(self.num_local_experts, self.ffn_hidden_size) if gated_bias else None
        self.b2 = parameter(self.num_local_experts, config.hidden_size) if bias else None
        self._init_method = init_method or partial(nn.init.normal_, std=config.init_std)
        output_std = config.init_std if config.output_init_std is None else config.output_init_std
        self._output_init_method = output_init_method or partial(nn.init.normal_, std=output_std)
        if self.w1.is_cuda and can_compile_ahead():
            hash_triton()  # in a thread, while the weights are drawn
        self.reset_parameters(seed)
        self._register_load_state_dict_pre_hook(self._accept_old_layouts)

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw every parameter anew; see the class for `seed`."""
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        device = self.w1.device
        if device.type == "meta":
            return
        shard = slice(self.ffn_shard[0] * self.ffn_hidden_size, (self.ffn_shard[0] + 1) * self.ffn_hidden_size)
        drawn = [(self.w1, self._init_method), (self.v1, self._init_method), (self.w2, self._output_init_method)]
        full = torch.empty(self.config.ffn_hidden_size, self.config.hidden_size, device=device, dtype=torch.float32)
        for local in range(self.num_local_experts):
            with _seeded(device, _seed_of(seed, self.expert_offset + local)):
                for weight, init in drawn:
                    if weight is not None:
                        init(full)
                        self._per_expert(weight)[local].copy_(full[shard])
        for bias in (self.b1, self.c1, self.b2):
            if bias is not None:
                bias.zero_()

    def _per_expert(self, weight: Tensor) -> Tensor:
        return weight.view(self.num_local_experts, self.ffn_hidden_size, self.config.hidden_size)

    def forward(self, x: Tensor, dispatch: Dispatch, weight: Tensor | None = None) -> Tensor:
        """Gather each pair's token, run its expert, and add up the weighted outputs of each token.

        Args:
            x: (T, H), in the parameters' dtype (any under autocast).
            dispatch: over the local experts.
            weight: (R,) float32, what a pair's output is multiplied by; None for ones.

        Returns:
            (T, H); zeros for a token without an expert.
        """
        return self.forward_with_router(x, dispatch, weight, None)

    def forward_with_router(
        self, x: Tensor, dispatch: Dispatch, weight: Tensor | None, router: tuple[Tensor, float] | None
    ) -> Tensor:
        """As `forward`; router: router_weight and router_scaling of a Routing, which mlp_impl "fused" alone takes."""
        x = self._prepare(x)
        impl = self._impl_of(x)
        if router is not None and impl != "fused":
            raise ValueError(f"mlp_impl={impl!r}: leaves the router's part out of x's gradient, must be 'fused'")
        if x.is_cuda and not torch.compiler.is_compiling():
            call = "dispatched", impl, weight is None, router is None
            self._ahead(call, x, self.w1, lambda: [self._dispatched(impl, leaf(x), dispatch, leaf(weight), router)])
        return self._dispatched(impl, x, dispatch, weight, router)

    def _dispatched(
        self, impl: str, x: Tensor, dispatch: Dispatch, weight: Tensor | None, router: tuple[Tensor, float] | None
    ) -> Tensor:
        with without_autocast(x):
            weights, offsets = self._weights(x.dtype), dispatch.expert_offsets
            if impl == "sparse":
                return self._sparse(weights, x, dispatch, weight)
            if impl in _WHOLE:
                return self._whole(impl, weights, x, dispatch, weight, router=router)
            if impl == "grouped":
                rows = grouped_mlp(weights, x, offsets, self.config, dispatch)
            else:
                rows = reference_mlp(weights, gather(x, dispatch), offsets, self.config)
            return combine(rows, weight, dispatch, num_bits=self.config.quantize_scatter_num_bits)

    def forward_sorted(self, rows: Tensor, expert_offsets: Tensor) -> Tensor:
        """Rows already sorted by local expert.

        Args:
            rows: (R, H).
            expert_offsets: (E+1,) int32, first row of each expert, and the number of rows in use.

        Returns:
            (R, H); rows from expert_offsets[E] on are unspecified.
        """
        rows = self._prepare(rows)
        impl = self._impl_of(rows)
        if rows.is_cuda and not torch.compiler.is_compiling():
            self._ahead(("sorted", impl), rows, self.w1, lambda: [self._sorted(impl, leaf(rows), expert_offsets)])
        return self._sorted(impl, rows, expert_offsets)

    def _sorted(self, impl: str, rows: Tensor, expert_offsets: Tensor) -> Tensor:
        with without_autocast(rows):
            weights = self._weights(rows.dtype)
            if impl == "sparse":
                return self._sparse(weights, rows, sorted_dispatch(expert_offsets, rows.shape[0]), None)
            if impl in _WHOLE:
                identity = sorted_dispatch(expert_offsets, rows.shape[0])
                return self._whole(impl, weights, rows, identity, None, in_order=True)
            if impl == "reference":
                return reference_mlp(weights, rows, expert_offsets, self.config)
            gathers = self.config.quantize_inputs_num_bits != OFF  # keeps its input once for both up-projections
            dispatch = sorted_dispatch(expert_offsets, rows.shape[0]) if gathers else None
            return grouped_mlp(weights, rows, expert_offsets, self.config, dispatch)

    def forward_padded(self, bins: Tensor) -> Tensor:
        """The same number of rows for every expert, whatever stands in them; mlp_impl only tells the reference apart.

        Args:
            bins: (E, C, H).

        Returns:
            (E, C, H).
        """
        bins, config = self._prepare(bins), self.config
        with without_autocast(bins):
            weights = self._weights(bins.dtype)
            rows = bins.flatten(0, 1)
            if config.mlp_impl == "reference":
                offsets = torch.arange(bins.shape[0] + 1) * bins.shape[1]
                return reference_mlp(weights, rows, offsets, config).view(bins.shape)
            if config.quantize_inputs_num_bits == config.quantize_rematerialize_num_bits == OFF:
                return batched_mlp(weights, bins, config)
            # as rows of equal counts, since the grouped ops are those that can keep less
            offsets = torch.arange(bins.shape[0] + 1, dtype=torch.int32, device=bins.device) * bins.shape[1]
            dispatch = sorted_dispatch(offsets, rows.shape[0])
            return grouped_mlp(weights, rows, offsets, config, dispatch).view(bins.shape)

    def mlp_impl_for(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str:
        """What rows are computed by, however many: mlp_impl, or what "auto" picks.

        Args:
            device, dtype: of the rows; the parameters' if None.
        """
        if self.config.mlp_impl != "auto":
            return self.config.mlp_impl
        config = self.config
        bits = config.quantize_inputs_num_bits, config.quantize_rematerialize_num_bits, config.quantize_scatter_num_bits
        return mlp_choice.choose_mlp_impl(
            on_hopper=mlp_choice.hopper_kernels_run(self.w1.device if device is None else device),
            dtype=self.w1.dtype if dtype is None else dtype,
            biased=config.mlp_bias,
            keeps_less=config.recompute_activation or any(b != OFF for b in bits),
            num_experts=self.num_local_experts,
            hidden_size=config.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
        )

    def _impl_of(self, x: Tensor) -> str:
        impl = self.mlp_impl_for(device=x.device, dtype=x.dtype)
        if self.config.mlp_impl == "auto" and not torch.compiler.is_compiling():
            _log_once(f"mlp_impl='auto' on {x.device.type} in {x.dtype}: using {impl!r}")
        return impl

    def _sparse(self, weights: ExpertWeights, x: Tensor, dispatch: Dispatch, weight: Tensor | None) -> Tensor:
        block_size = mlp_choice.block_size_of(self.ffn_hidden_size)
        assert block_size is not None, "check_sparse_width refuses such a width, and auto does not pick it"
        return sparse_experts(weights, x, dispatch, weight, self.config, block_size)

    def _whole(
        self, impl: str, weights: ExpertWeights, x: Tensor, dispatch: Dispatch, weight: Tensor | None,
        *, in_order: bool = False, router: tuple[Tensor, float] | None = None,
    ) -> Tensor:  # fmt: skip
        more: dict[str, Any] = {}
        if impl == "fused":
            more = {"main_grads": self._main_grads(x.dtype), "in_order": in_order, "router": router}
        return _WHOLE[impl](weights, x, dispatch, weight, self.config, **more)

    def _main_grads(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Where a product may add the gradients of w1, v1 and w2, (E, I, H) each; None where it may not."""

        def of(parameter: nn.Parameter | None) -> Tensor | None:
            main_grad = main_grad_of(parameter)
            if main_grad is None or main_grad.dtype != accumulation_dtype(dtype) or not main_grad.is_contiguous():
                return None
            return self._per_expert(main_grad)

        if not self.config.gradient_accumulation_fusion or self.grad_scale != 1.0:
            return None, None, None
        return of(self.w1), of(self.v1), of(self.w2)

    def _weights(self, dtype: torch.dtype) -> ExpertWeights:
        """The parameters as the MLP takes them: per expert, gradients scaled, in the dtype of the rows."""

        def matrix(weight: nn.Parameter) -> Tensor:
            if is_compiling_ahead():
                return leaf(self._per_expert(weight)).to(dtype)
            # what is computed with the parameter adds to main_grad, or this does, whichever implementation it is
            fused = to_main_grad(weight) if self.config.gradient_accumulation_fusion else weight
            return scale_gradient(self._per_expert(fused), self.grad_scale).to(dtype)

        def vector(bias: Tensor | None) -> Tensor | None:
            bias = leaf(bias) if is_compiling_ahead() else bias
            return None if bias is None else scale_gradient(bias, self.grad_scale).to(dtype)

        return ExpertWeights(
            matrix(self.w1),
            None if self.v1 is None else matrix(self.v1),
            matrix(self.w2),
            vector(self.b1),
            vector(self.c1),
            # Other shards add zeros instead of leaving b2 out: gradient reducers wait for every parameter's gradient.
            vector(self.b2 if self.b2 is None or self.ffn_shard[0] == 0 else self.b2 * 0),
        )

    def _prepare(self, rows: Tensor) -> Tensor:
        rows = cast_if_autocast_enabled(rows)
        if rows.dtype != self.w1.dtype and not torch.is_autocast_enabled(rows.device.type):
            raise ValueError(f"x: has dtype {rows.dtype}, must be the experts' {self.w1.dtype} outside autocast")
        return rows

    def _accept_old_layouts(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Bring matrices of other shapes to (E·I, H): those of 0.10's capacity layer, and those of all experts.

        0.10's capacity layer keeps w1 as (E, H, I) and w2 as (E, I, H). A matrix of all experts in full width is cut to
        the experts and the width held here.
        """
        config = self.config
        for name in ("w1", "v1", "w2"):
            weight = state.get(prefix + name)
            if weight is None or weight.dim() not in (2, 3):
                continue
            if weight.dim() == 3:
                weight = weight if name == "w2" else weight.transpose(1, 2)
                weight = weight.reshape(-1, weight.shape[2])
            everything = (config.num_experts * config.ffn_hidden_size, config.hidden_size)
            if weight.shape == everything and weight.shape != self.w1.shape:
                width, start = self.ffn_hidden_size, self.ffn_shard[0] * self.ffn_hidden_size
                weight = weight.view(config.num_experts, config.ffn_hidden_size, config.hidden_size)
                weight = weight[self.expert_offset : self.expert_offset + self.num_local_experts, start : start + width]
                weight = weight.reshape(-1, config.hidden_size)
            state[prefix + name] = weight

    def extra_repr(self) -> str:
        last = self.expert_offset + self.num_local_experts - 1
        shard = "" if self.ffn_shard[1] == 1 else f", shard {self.ffn_shard[0]} of {self.ffn_shard[1]}"
        config, impl = self.config, self.mlp_impl_for()
        return (
            f"experts {self.expert_offset}..{last} of {config.num_experts}, hidden_size={config.hidden_size}, "
            f"ffn_hidden_size={self.ffn_hidden_size}{shard}, activation={config.activation}, "
            f"mlp_impl={f'auto ({impl})' if config.mlp_impl == 'auto' else impl}"
        )
