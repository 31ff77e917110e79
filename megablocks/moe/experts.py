"""The experts of one rank: parameters, initialization, gradient scaling, and the call that computes the experts.

Legend: T tokens, R rows (pairs), H hidden, I expert width on this rank, E local experts.
Parameters have the layout of megablocks 0.10: w1, v1, w2 are (E·I, H), so expert e owns rows [e·I, (e+1)·I).
`megablocks.moe.impls` has the formula and the implementations.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from megablocks.config import MoEConfig, check_width
from megablocks.kinds import IMPLS, load
from megablocks.moe.device_mesh import copy_rows
from megablocks.moe.groups import ExpertShard
from megablocks.moe.impls import ExpertCall, batched, impl_for, saved_by, sorted_dispatch
from megablocks.moe.main_grad import main_grad_of, to_main_grad
from megablocks.ops.fused.mlp import ExpertParameters, MainGrads
from megablocks.ops.fused.remote import Remote, remote_mlp
from megablocks.ops.hopper import why_off
from megablocks.ops.library import under_autocast
from megablocks.ops.permute.rows import combine, gather
from megablocks.ops.quant.quant import OFF
from megablocks.ops.routing.dispatch import Dispatch, bin_dispatch

logger = logging.getLogger(__name__)

InitFn = Callable[[Tensor], Any]
COMPUTE: dict[str, Callable[[ExpertCall], Tensor]] = {name: load(impl.function) for name, impl in IMPLS.items()}
"""The functions of `IMPLS`, imported: torch.compile cannot trace an import."""


class Experts(nn.Module):
    """The MLP experts of a layer that one rank holds, allocated once at their local size.

    Args:
        config: of the layer. The experts use its activation, mlp_bias, mlp_impl, init stds, and what to save.
        shard: which experts, and which slice of their width, this rank holds; None for all. If the width is split, the
            outputs are partial sums that the caller adds up, and only shard rank 0 adds b2.
        init_method, output_init_method: fill the w1 and v1, or the w2, of one expert (ffn_hidden_size, H) in place.
            Default: a normal distribution with std init_std, or output_init_std.
        seed: the full weights of each expert are drawn in float32. Their seed is made from this one and the expert's
            global index. So weights do not depend on the spread over ranks. Default: a number from torch's CPU
            generator, which is equal on ranks that gave torch the same seed.
        grad_scale: factor on the parameters' gradients; `megablocks.moe.dispatchers` says when it is 1/ranks.
        device, dtype: of the parameters; torch's defaults if None.

    Raises:
        ValueError: a shard outside the layer, or a width that mlp_impl cannot compute (ConfigError).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        shard: ExpertShard | None = None,
        init_method: InitFn | None = None,
        output_init_method: InitFn | None = None,
        seed: int | None = None,
        grad_scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shard = ExpertShard(0, config.num_experts) if shard is None else shard
        _check_shard(shard, config)
        self.config, self.shard, self.grad_scale = config, shard, grad_scale
        self.num_local_experts = shard.num_local_experts
        self.ffn_hidden_size = config.ffn_hidden_size // shard.ffn_size

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
        self._is_parallel: bool | None = None
        self.reset_parameters(seed)
        self._register_load_state_dict_pre_hook(self._accept_old_layouts)
        self.register_load_state_dict_post_hook(_mark_assigned)

    def mark(self, is_parallel: bool | None) -> None:
        """Set the attribute of megablocks 0.10 that tells trainers whether ranks hold different experts."""
        self._is_parallel = is_parallel
        if is_parallel is not None:
            for parameter in self.parameters(recurse=False):
                parameter.expert_model_parallel = is_parallel  # type: ignore[attr-defined]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        """Called by `module.to` and similar methods. They replace parameters on "meta" by new ones without the mark."""
        super()._apply(fn, recurse)
        self.mark(self._is_parallel)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by `copy.deepcopy`, which also makes parameters without the mark."""
        super().__setstate__(state)
        self.mark(state.get("_is_parallel"))

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize every parameter again; see the class for `seed`. A FakeTensor has no values to initialize."""
        if isinstance(local_part(self.w1), FakeTensor):
            return
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        device = self.w1.device
        if device.type == "meta":
            return
        width, start = self.ffn_hidden_size, self.shard.ffn_rank * self.ffn_hidden_size
        is_whole = self.w1.shape[0] > self.num_local_experts * width  # a DTensor of all experts
        first = self.shard.expert_offset * width if is_whole else 0
        drawn = [(self.w1, self._init_method), (self.v1, self._init_method), (self.w2, self._output_init_method)]
        full = torch.empty(self.config.ffn_hidden_size, self.config.hidden_size, device=device, dtype=torch.float32)
        for local in range(self.num_local_experts):
            with _seeded(device, seed, self.shard.expert_offset + local):
                for weight, init in drawn:
                    if weight is not None:
                        init(full)
                        copy_rows(weight, first + local * width, full[start : start + width])
        for bias in (self.b1, self.c1, self.b2):
            if bias is not None:
                local_part(bias).zero_()

    def _per_expert(self, weight: Tensor, is_w2: bool = False) -> Tensor:
        """Return a view (E, I, H) of a matrix; `is_w2` is for a subclass that stores that one differently."""
        return local_part(weight).view(self.num_local_experts, self.ffn_hidden_size, self.config.hidden_size)

    def forward(
        self, x: Tensor, dispatch: Dispatch | Remote, weight: Tensor | None = None, *, places: int | None = None
    ) -> Tensor:
        """Gather each pair's token, run its expert, and add up the weighted outputs of each token.

        Args:
            x: (T, H), in the parameters' dtype (any under autocast).
            dispatch: over the local experts; or, if `takes_remote`, a Remote over the experts of several ranks.
            weight: (R,) float32, the factor on a pair's output; None for ones. (T, K) with a Remote.
            places: rows that each expert computes, filled by a pair or empty; None for one row per pair.

        Returns:
            (T, H) in x's dtype, or in autocast's; zeros for a token without an expert.

        Raises:
            ValueError: outside autocast, the dtypes of x and the parameters differ.
        """
        if places is not None:
            assert isinstance(dispatch, Dispatch)
            bins = bin_dispatch(dispatch, places)
            rows = gather(x, bins).view(dispatch.num_experts, places, x.shape[1])
            out = self.forward_padded(rows).flatten(0, 1)
            return combine(out, weight, bins, num_bits=self.config.quantize_scatter_num_bits)
        return self._compute(x, dispatch, weight, in_order=False)

    def takes_remote(self, x: Tensor) -> bool:
        """Return whether the experts exchange tokens between ranks themselves, for rows like x (T, H)."""
        return self.mlp_impl_for(device=x.device, dtype=x.dtype) == "fused"

    def forward_sorted(self, rows: Tensor, expert_offsets: Tensor) -> Tensor:
        """Compute rows that are sorted by local expert.

        Args:
            rows: (R, H).
            expert_offsets: (E+1,) int32, first row of each expert, and the number of rows in use.

        Returns:
            (R, H); rows from expert_offsets[E] on are unspecified.

        Raises:
            ValueError: outside autocast, the dtypes of rows and parameters differ.
        """
        return self._compute(rows, sorted_dispatch(expert_offsets, rows.shape[0]), None, in_order=True)

    def _compute(self, x: Tensor, dispatch: Dispatch | Remote, weight: Tensor | None, *, in_order: bool) -> Tensor:
        """Run the implementation, which "auto" chooses here. A first call on a GPU compiles its kernels in parallel."""
        x = self._checked(x)
        impl = self.config.mlp_impl
        if impl == "auto" or self.config.batch_invariant:
            impl = self.mlp_impl_for(device=x.device, dtype=x.dtype)
            if self.config.mlp_impl == "auto" and not torch.compiler.is_compiling():
                _log_once(f"mlp_impl='auto' on {x.device.type} in {x.dtype}: using {impl!r}")

        def step(x: Tensor, weight: Tensor | None) -> Tensor:
            of_parameters, of_output = self._grad_scales(x)
            x = scale_gradient(x, 1 / of_output)
            weight = None if weight is None else scale_gradient(weight, 1 / of_output)
            parameters = self._parameters_in(x.dtype, of_parameters)
            main_grads = MainGrads() if of_parameters != 1.0 else self._main_grads(x.dtype)
            with without_autocast(x):  # x and the parameters already have autocast's dtype
                if isinstance(dispatch, Remote):
                    assert weight is not None
                    options = saved_by(self.config) | {"main_grads": main_grads}
                    y = remote_mlp(x, weight, dispatch, parameters, self.config.act, **options)
                else:
                    call = ExpertCall(parameters, x, dispatch, weight, self.config, in_order, main_grads)
                    y = COMPUTE[impl](call)
            return scale_gradient(y, of_output)

        # If a wrapper replaced the parameter by a DTensor, a stand-in would not keep its gradient separate.
        if x.is_cuda and type(self.w1) is nn.Parameter:
            from megablocks.ops.launch import compile_first_call

            compile_first_call(self, (impl, in_order, type(dispatch)), lambda *inputs: [step(*inputs)], x, weight)
        return step(x, weight)

    def forward_padded(self, bins: Tensor) -> Tensor:
        """Compute the same number of rows C for every expert, filled or empty: bins (E, C, H) → (E, C, H).

        It uses one torch.bmm per projection for every mlp_impl except "reference". If inputs or pre-activations are
        saved quantized, it uses grouped GEMMs with equal counts instead.

        Raises:
            ValueError: outside autocast, the dtypes of bins and parameters differ.
        """
        bins, config = self._checked(bins), self.config
        quantized = (config.quantize_inputs_num_bits, config.quantize_rematerialize_num_bits) != (OFF, OFF)
        parameters = self._parameters_in(bins.dtype)
        with without_autocast(bins):
            if config.mlp_impl != "reference" and not quantized:
                return batched(parameters, bins, config)
            rows = bins.flatten(0, 1)
            offsets = torch.arange(bins.shape[0] + 1, dtype=torch.int32, device=bins.device) * bins.shape[1]
            impl = "reference" if config.mlp_impl == "reference" else "grouped"
            dispatch = sorted_dispatch(offsets, rows.shape[0])
            return COMPUTE[impl](ExpertCall(parameters, rows, dispatch, None, config, True)).view(bins.shape)

    def mlp_impl_for(self, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str:
        """Return the implementation, for any number of rows: mlp_impl, or what "auto" picks.

        Args:
            device, dtype: of the rows; the parameters' if None.
        """
        device, dtype = device or self.w1.device, dtype or self.w1.dtype
        return impl_for(self.config, device, dtype, self.num_local_experts, self.ffn_hidden_size)

    def _grad_scales(self, x: Tensor) -> tuple[float, float]:
        """Return the factors on the gradients of the parameters and of the output, for rows like x (R, H).

        One of them is grad_scale, the other 1. A factor on the output's gradient is undone in those of x and weight.
        It writes fewer bytes if x has fewer rows than the matrices. It is exact for a power of two, but can underflow
        in float16.
        """
        exact = x.dtype != torch.float16 and math.frexp(self.grad_scale)[0] == 0.5
        few = not torch.compiler.is_compiling() and x.shape[0] < self.num_local_experts * self.ffn_hidden_size
        return (1.0, self.grad_scale) if exact and few and self.w1.requires_grad else (self.grad_scale, 1.0)

    def _main_grads(self, dtype: torch.dtype) -> MainGrads:
        """Return where a product can add the gradients of w1, v1 and w2, (E, I, H) each; None where it cannot."""

        if not self.config.gradient_accumulation_fusion:
            return MainGrads()
        wanted = torch.promote_types(dtype, torch.float32)

        def of(parameter: nn.Parameter | None) -> Tensor | None:
            main_grad = main_grad_of(parameter)
            if main_grad is None or main_grad.dtype != wanted or not main_grad.is_contiguous():
                return None
            return self._per_expert(main_grad)

        return MainGrads(of(self.w1), of(getattr(self, "v1", None)), of(self.w2))

    def _parameters_in(self, dtype: torch.dtype, scale: float | None = None) -> ExpertParameters:
        """Return the parameters by expert, in the rows' dtype. Their gradients are scaled (None: by grad_scale) and
        added to main_grad."""
        scale = self.grad_scale if scale is None else scale
        v1: nn.Parameter | None = getattr(self, "v1", None)  # experts built from `Arguments` have v1 only if it is used

        def matrix(parameter: nn.Parameter, is_w2: bool = False) -> Tensor:
            # For every implementation: either its product adds to main_grad, or this autograd node does.
            fused = to_main_grad(parameter) if self.config.gradient_accumulation_fusion else parameter
            return scale_gradient(self._per_expert(fused, is_w2), scale).to(dtype)

        def vector(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else scale_gradient(local_part(bias), scale).to(dtype)

        return ExpertParameters(
            matrix(self.w1),
            None if v1 is None else matrix(v1),
            matrix(self.w2, is_w2=True),
            vector(self.b1),
            vector(self.c1),
            # Other shards add zeros instead of leaving b2 out: gradient reducers wait for every parameter's gradient.
            vector(self.b2 if self.b2 is None or self.shard.ffn_rank == 0 else self.b2 * 0),
        )

    def _checked(self, rows: Tensor) -> Tensor:
        """Return the rows in autocast's dtype; outside autocast they must have the parameters' dtype."""
        if self.w1.is_meta and not rows.is_meta:  # the products would read unset memory
            raise ValueError(f'x: is on {rows.device}, the experts are on "meta": call to_empty and reset_parameters')
        if not rows.is_meta and torch.is_autocast_enabled(rows.device.type):
            return under_autocast(rows)[0]
        if rows.dtype != self.w1.dtype:
            raise ValueError(f"x: has dtype {rows.dtype}, must be the experts' {self.w1.dtype} outside autocast")
        return rows

    def _accept_old_layouts(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Convert matrices of other shapes to (E·I, H): from 0.10's capacity layer, or of all experts.

        0.10's capacity layer stores w1 as (E, H, I) and w2 as (E, I, H). From tensors of all experts at full width,
        only the experts and the width of this rank are kept.
        """
        config, first, start = self.config, self.shard.expert_offset, self.shard.ffn_rank * self.ffn_hidden_size
        experts, columns = slice(first, first + self.num_local_experts), slice(start, start + self.ffn_hidden_size)
        num_experts, width, hidden = config.num_experts, config.ffn_hidden_size, config.hidden_size
        for name in ("w1", "v1", "w2"):
            weight = state.get(prefix + name)
            if weight is None or weight.dim() not in (2, 3):
                continue
            if weight.dim() == 3:
                weight = weight if name == "w2" else weight.transpose(1, 2)
                weight = weight.reshape(-1, weight.shape[2])
            if weight.shape == (num_experts * width, hidden) and weight.shape != self.w1.shape:
                weight = weight.view(num_experts, width, hidden)[experts, columns].reshape(-1, hidden)
            state[prefix + name] = weight
        for name, own, size in (("b1", self.b1, width), ("c1", self.c1, width), ("b2", self.b2, hidden)):
            bias = state.get(prefix + name)
            if bias is not None and own is not None and own.shape != bias.shape == (num_experts, size):
                state[prefix + name] = bias[experts] if name == "b2" else bias[experts, columns]

    def extra_repr(self) -> str:
        config, shard, impl = self.config, self.shard, self.mlp_impl_for()
        last = shard.expert_offset + shard.num_local_experts - 1
        part = "" if shard.ffn_size == 1 else f", shard {shard.ffn_rank} of {shard.ffn_size}"
        off = why_off(self.w1.device.index) if self.w1.is_cuda else None
        return (
            f"experts {shard.expert_offset}..{last} of {config.num_experts}, hidden_size={config.hidden_size}, "
            f"ffn_hidden_size={self.ffn_hidden_size}{part}, activation={config.activation}, "
            f"mlp_impl={f'auto ({impl})' if config.mlp_impl == 'auto' else impl}"
            f"{'' if off is None else f', no kernels for Hopper because of {off}'}"
        )


def _mark_assigned(experts: Experts, _: Any) -> None:
    """Called after `load_state_dict`, which with assign=True makes parameters without the mark."""
    experts.mark(experts._is_parallel)


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of weight, a DTensor of any shape; return any other tensor unchanged."""
    # hasattr looks at the type, because torch.compile does not find the method by name on a DTensor itself
    return weight.to_local() if hasattr(type(weight), "to_local") else weight  # type: ignore[attr-defined]


def without_autocast(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that turns autocast off for the device of `t`."""
    if t.is_meta or not torch.is_autocast_enabled(t.device.type):
        return contextlib.nullcontext()
    return torch.autocast(t.device.type, enabled=False)


def _check_shard(shard: ExpertShard, config: MoEConfig) -> None:
    offset, experts = shard.expert_offset, shard.num_local_experts
    if offset < 0 or experts < 1 or offset + experts > config.num_experts:
        raise ValueError(
            f"expert_offset={offset}, num_local_experts={experts}: must lie within num_experts={config.num_experts}"
        )
    if not 0 <= shard.ffn_rank < shard.ffn_size or config.ffn_hidden_size % shard.ffn_size:
        raise ValueError(
            f"ffn_rank={shard.ffn_rank}, ffn_size={shard.ffn_size}: must be 0 <= ffn_rank < ffn_size, and ffn_size "
            f"must divide ffn_hidden_size={config.ffn_hidden_size}"
        )
    check_width(config.mlp_impl, config.ffn_hidden_size, shard.ffn_size)


@cache
def _log_once(message: str) -> None:
    logger.info(message)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int, expert: int) -> Iterator[None]:
    """Give one expert its own seed on `device` inside the block, and restore every generator afterwards."""
    digest = hashlib.blake2b(f"{seed}:{expert}".encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        yield


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.detach()  # not a view: FSDP2 warns if a module returns one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """Return `x`, of any shape, unchanged; its gradient is multiplied by `scale`."""
    return x if scale == 1.0 or not torch.is_grad_enabled() else _ScaleGradient.apply(x, scale)
