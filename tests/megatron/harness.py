"""A tiny GPT on real megatron-core, trained in any parallel layout from the same weights and data.

Every rank fills its parameters from their global tensors (drawn under a seed made from the tensor's name) through the
model's own sharded_state_dict, and returns gradients or weights the same way. So what is compared between layouts is
the whole: attributes, collectives, schedules and checkpoint offsets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megablocks.testing.launcher import RankFailed, run_distributed_test

SEQ, VOCAB, GLOBAL_BATCH = 16, 64, 4


@dataclass(frozen=True)
class Layout:
    """How the model is spread over ranks and trained.

    model: more fields of TransformerConfig. settings: of MegaBlocksSettings. tied: the output layer has the word
    embedding's weight. loss_kept_gib: logits that the fused loss keeps; None: Megatron's own loss. expert_bias: initial
    value of the routers' selection bias. engine_adam: Megatron takes Transformer Engine's Adam, not torch's.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    micro_batch: int = 1
    global_batch: int = GLOBAL_BATCH
    distributed_optimizer: bool = False
    overlap: bool = False
    recompute: str = ""
    dtype: str = "float32"
    layers: int = 4
    model: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    tied: bool = True
    loss_kept_gib: float | None = None
    expert_bias: tuple[float, ...] = ()
    engine_adam: bool = False

    def but(self, **changes: Any) -> Layout:
        return dataclasses.replace(self, **changes)


@dataclass
class Trained:
    """A run's results: `losses`, `norms` and `aux` of each step, `grads` of the first, last `weights`, the load."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[tuple] = field(default_factory=list)
    weights: list[tuple] = field(default_factory=list)
    aux: list[dict[str, float]] = field(default_factory=list)
    load: torch.Tensor | None = None


def sample(index: int) -> torch.Tensor:
    """Sequence `index` of a noisy affine chain. It can be learned and is the same in every layout."""
    generator = torch.Generator().manual_seed(1000 + index)
    noise = torch.rand(SEQ, generator=generator)
    other = torch.randint(VOCAB, (SEQ,), generator=generator).tolist()
    tokens = [int(torch.randint(VOCAB, (1,), generator=generator))]
    for position in range(SEQ):
        tokens.append(other[position] if noise[position] < 0.1 else (5 * tokens[-1] + 3) % VOCAB)
    return torch.tensor(tokens)


def initialize(layout: Layout) -> None:
    """Make model-parallel groups and set seeds. It may be called again in the same processes."""
    if dist.get_backend() == "gloo":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # several ranks test the CPU path, even on a machine with a GPU
    logging.getLogger().setLevel(logging.WARNING)
    from megablocks.megatron import cpu, optimizer_state

    cpu.install()
    optimizer_state.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    parallel_state.destroy_model_parallel()
    _destroy_groups()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _destroy_groups() -> None:
    """Destroy all groups but the default one. Megatron only drops them, but each of gloo's has a thread that polls."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from torch.distributed import distributed_c10d

    RotaryEmbedding.forward.cache_clear()  # the cache holds modules, which hold their group
    for model in gc.get_objects():
        if isinstance(model, DistributedDataParallel):
            model.grad_accs.clear()  # this cycle through C++ would keep every earlier model alive
    gc.collect()
    dist.barrier()  # another rank may still use the groups
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def transformer_config(layout: Layout) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megablocks.megatron.settings import MegaBlocksSettings

    dtype = getattr(torch, layout.dtype)
    values: dict[str, Any] = dict(
        num_layers=layout.layers,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=48,
        num_moe_experts=4,
        moe_ffn_hidden_size=48,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.02,
        moe_z_loss_coeff=1e-3,
        add_bias_linear=False,
        use_cpu_initialization=not torch.cuda.is_available(),
        persist_layer_norm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1,
    )
    if layout.vpp is not None:
        values |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    if layout.recompute == "full":
        values |= dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif layout.recompute:
        values |= dict(recompute_granularity="selective", recompute_modules=layout.recompute.split(","))
    values |= dict(layout.model)
    config = (MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig)(**values)
    config.megablocks = MegaBlocksSettings(**dict(layout.settings))
    return config


def build_model(layout: Layout) -> tuple[Any, list[Any]]:
    """(config, model chunks wrapped in DDP), with the same weights in every layout."""
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megablocks.megatron.specs import block_spec

    config = transformer_config(layout)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap,
        overlap_param_gather=layout.overlap and layout.distributed_optimizer,
        grad_reduce_in_fp32=True,
        bucket_size=5000 if layout.overlap else None,
    )
    chunks = []
    for stage in range(layout.vpp or 1):
        vp_stage = stage if layout.vpp else None
        model: Any = GPTModel(
            config,
            block_spec(config, vp_stage=vp_stage),
            VOCAB,
            SEQ,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        if torch.cuda.is_available():
            model.cuda()
        fill_weights(model)
        if layout.dtype != "float32":
            model = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, ddp, model, disable_bucketing=stage > 0))
    if layout.overlap:
        config.no_sync_func = [c.no_sync for c in chunks] if layout.vpp else chunks[0].no_sync
        if layout.pp > 1:
            config.grad_sync_func = [c.start_grad_sync for c in chunks] if layout.vpp else chunks[0].start_grad_sync
    return config, chunks


def build_optimizer(layout: Layout, chunks: list[Any], lr: float = 3e-3) -> Any:
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer

    megatron_optimizer.USING_PYTORCH_OPTIMIZER = not layout.engine_adam
    distrib_optimizer.HAVE_APEX_OR_TE = layout.engine_adam
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=0.0,
        clip_grad=1.0,
        bf16=layout.dtype == "bfloat16",
        fp16=layout.dtype == "float16",
        initial_loss_scale=2.0**10,
        params_dtype=getattr(torch, layout.dtype),
        use_distributed_optimizer=layout.distributed_optimizer,
    )
    return get_megatron_optimizer(optimizer_config, chunks)


def sharded_entries(model: Any) -> list[Any]:
    """The model's sharded tensors and factories that hold parameters."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    entries = nested_values(model.sharded_state_dict(metadata={}))
    return [
        entry
        for entry in entries
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and isinstance(entry.data, torch.nn.Parameter)
    ]


def _pieces(entry: Any, data: torch.Tensor) -> list[Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(entry, ShardedTensorFactory):
        built = dataclasses.replace(entry, data=data).build()
        return list(nested_values(built)) if isinstance(built, (dict, list)) else [built]
    return [dataclasses.replace(entry, data=data, dtype=data.dtype)]


@torch.no_grad()
def fill_weights(model: Any) -> None:
    for entry in sharded_entries(model):
        for piece in _pieces(entry, entry.data.data):
            generator = torch.Generator().manual_seed(zlib.crc32(piece.key.encode()))
            full = 0.1 * torch.randn(piece.global_shape, generator=generator)
            if "norm" in piece.key and piece.key.endswith("weight"):
                full += 1
            part = full[tuple(slice(o, o + n) for o, n in zip(piece.global_offset, _span(piece), strict=True))]
            piece.data.copy_(part.view_as(piece.data))


def _span(piece: Any) -> tuple[int, ...]:
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)


@torch.no_grad()
def global_pieces(chunks: list[Any], of: Any) -> list[tuple]:
    """(name, global shape, offset, span, values) of `of(parameter)` for every parameter on this rank."""
    out = []
    for chunk in chunks:
        model = chunk.module.module if type(chunk.module).__name__ == "Float16Module" else chunk.module
        for entry in sharded_entries(model):
            if not entry.data.requires_grad:
                continue
            for piece in _pieces(entry, of(entry.data)):
                values = piece.data.detach().float().cpu().numpy().copy()
                span = _span(piece)
                out.append((piece.key, tuple(piece.global_shape), tuple(piece.global_offset), span, values))
    return out


def assemble(by_rank: list[list[tuple]], tolerance: float = 1e-6) -> dict[str, np.ndarray]:
    """Global tensors from the pieces of all ranks. Asserts that they are complete and that ranks agree."""
    tensors: dict[str, np.ndarray] = {}
    for pieces in by_rank:
        for key, shape, offset, span, values in pieces:
            tensor = tensors.setdefault(key, np.full(shape, np.nan, dtype=np.float32))
            place = tuple(slice(o, o + n) for o, n in zip(offset, span, strict=True))
            values = values.reshape(span)
            there = tensor[place]
            known = ~np.isnan(there)
            scale = max(np.abs(values).max(initial=0), 1e-12)
            assert np.all(np.abs(there - values)[known] <= tolerance * scale), f"{key}: ranks disagree at {offset}"
            tensor[place] = values
    for key, tensor in tensors.items():
        assert not np.isnan(tensor).any(), f"{key}: some of it is on no rank"
    return tensors


def worst_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> tuple[float, str]:
    """(largest relative norm of a - b over tensors, its name). `b` is the reference."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    floor = 1e-6 * max(float(np.linalg.norm(t)) for t in b.values())
    worst = (0.0, "")
    for key, reference in b.items():
        error = float(np.linalg.norm(a[key] - reference)) / max(float(np.linalg.norm(reference)), floor)
        worst = max(worst, (error, key))
    return worst


def _main_grad(optimizer: Any, layout: Layout) -> Any:
    """A function that gives a parameter's reduced gradient, gathered if the distributed optimizer has split it."""
    from megatron.core import parallel_state as mpu

    def of(parameter: torch.nn.Parameter) -> torch.Tensor:
        grad = parameter.main_grad
        if not layout.distributed_optimizer:
            return grad
        expert = not getattr(parameter, "allreduce", True)
        group = mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group()
        total = torch.zeros_like(grad)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if parameter in part.model_param_gbuf_map:
                with contextlib.suppress(KeyError):  # this rank holds no part of it
                    span = part._get_model_param_range_map(parameter)["param"]
                    total.view(-1)[span.start : span.end] = grad.view(-1)[span.start : span.end]
        dist.all_reduce(total, group=group)
        return total

    return of


class Trainer:
    """A model, its optimizer and a step counter; `step()` trains one global batch."""

    def __init__(self, layout: Layout, lr: float = 3e-3) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.layout = layout
        initialize(layout)
        self.config, self.chunks = build_model(layout)
        self.optimizer = build_optimizer(layout, self.chunks, lr)
        if layout.expert_bias:
            for chunk in self.chunks:
                for module in chunk.modules():
                    if getattr(module, "expert_bias", None) is not None:
                        module.expert_bias.copy_(torch.tensor(layout.expert_bias))
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.done = 0

    def step(self, keep: Trained, *, grads: bool = False) -> None:
        from megatron.core import parallel_state as mpu
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        from megablocks.megatron.loss import loss_arguments

        layout, size = self.layout, self.layout.micro_batch
        fused = {} if layout.loss_kept_gib is None else loss_arguments(layout.loss_kept_gib)
        dp, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        micro_batches = layout.global_batch // (size * dp)
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")

        def batches() -> Any:
            for j in range(micro_batches):
                first = self.done * layout.global_batch + (j * dp + rank) * size
                batch = torch.stack([sample(first + q) for q in range(size)]).to(device)
                yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

        def forward(iterator: Any, model: Any) -> Any:
            tokens, labels = next(iterator)
            position = torch.arange(SEQ, device=device).expand(size, -1)
            output = model(tokens, position, None, labels=labels, **fused)

            def loss_of(losses: torch.Tensor) -> Any:
                loss = losses.float().mean()
                return loss, {"lm loss": loss.detach().clone()}

            return output, loss_of

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[batches() for _ in self.chunks] if layout.vpp else batches(),
            model=self.chunks if layout.vpp else self.chunks[0],
            num_microbatches=micro_batches,
            seq_length=SEQ,
            micro_batch_size=size,
            forward_only=False,
        )
        if grads:
            keep.grads = global_pieces(self.chunks, _main_grad(self.optimizer, layout))
        _, norm, _ = self.optimizer.step()
        loss = torch.zeros(1, device=device)
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            loss += torch.stack([r["lm loss"] for r in reduced]).mean() / dp / layout.tp
        dist.all_reduce(loss)
        keep.losses.append(float(loss))
        keep.norms.append(float(norm))
        aux: dict[str, Any] = {}
        get_moe_metrics_tracker().report(
            1 / micro_batches,
            self.done,
            total_loss_dict=aux,
            force_initialize=True,
            num_layers=layout.layers,
            track_names=self._losses(),
        )
        keep.aux.append({name: float(value) for name, value in aux.items()})
        self.done += 1

    def _losses(self) -> list[str]:
        names = {
            "aux_loss": "load_balancing_loss",
            "seq_aux_loss": "seq_load_balancing_loss",
            "global_aux_loss": "global_load_balancing_loss",
        }
        kind, config = self.config.moe_router_load_balancing_type, self.config
        out = [names[kind]] if kind in names and config.moe_aux_loss_coeff else []
        return out + (["z_loss"] if config.moe_z_loss_coeff else [])


def train(layout: Layout, steps: int = 1, *, weights: bool = False) -> Trained:
    """Train this rank's part. Returns what `Trained` lists."""
    from megablocks.monitor.expert_load import gather_load

    trainer, result = Trainer(layout), Trained()
    for step in range(steps):
        trainer.step(result, grads=step == 0)
    if weights:
        result.weights = global_pieces(trainer.chunks, lambda parameter: parameter.data)
    if trainer.config.num_moe_experts:
        result.load = gather_load(trainer.chunks, layout.layers, trainer.config.num_moe_experts)
    return result


def parameters(names: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Arguments for pytest.mark.parametrize. Those in `slow` are run by scripts/test.sh --all."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]


def selected(request: Any, names: Any) -> list[str]:
    """Those of `names` that are parameters of a selected test of this module."""
    tests = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = {value for item in tests for value in item.callspec.params.values()}
    return [name for name in names if name in values]


class Failure(dict):
    """Stands for results that could not be computed: every test that asks for one fails with the reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def __missing__(self, key: str) -> Any:
        raise self.error


def on_ranks(fn: Any, world_size: int, *args: Any, **options: Any) -> dict[str, list[Any]]:
    """Run `fn`, which returns results by name, on new ranks. Returns the results of all ranks by name."""
    try:
        ranks = run_distributed_test(fn, world_size, *args, **options)
    except RankFailed as error:
        return Failure(error)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def train_all(layouts: list[tuple[str, Layout, int]]) -> dict[str, Trained]:
    """Train each (name, layout, steps) one after the other in these processes."""
    return {name: train(layout, steps) for name, layout, steps in layouts}
