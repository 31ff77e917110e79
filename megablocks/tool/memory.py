"""Count a model's parameters, and the bytes that they and a training step need on one GPU, part by part.

A part's bytes are counted from the shapes of what the code saves for backward: docs/saving_memory.md for the experts,
Megatron's layers for the rest. Only memory outside of torch's tensors is assumed instead of counted.

Legend: t tokens of a micro-batch on a tensor-parallel group, s tokens of a rank's part of the sequence, R rows of the
experts on a rank, H hidden, I expert width, V vocabulary, e bytes of an element.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from megablocks.kinds import IMPLS
from megablocks.monitor.flops import forward_flops_per_token
from megablocks.tool.model import Model

GIB = 2**30
ERROR_BAR = 0.10
"""Share of the peak on one GPU, and on two with expert or data parallelism; docs/tool.md says what was measured."""
ERROR_BAR_LAYOUT = 0.20
"""Share of the peak in other layouts, which were not measured."""
OPTIMIZER_BYTES = {True: 12, False: 8}
"""A parameter's two moments, and its float32 copy if the model is in 16 bits."""
SAVED_BYTES = {-1: None, 8: 1.031, 4: 0.625}
"""Bytes of a quantized value with its share of the scales; None: not quantized."""
BLOCK = 128  # of the block-sparse products: "sparse" pads each expert's rows to a multiple of it
LOSS_CHUNK = 2**29  # bytes of logits that the fused loss computes at once: ops.loss.CHUNK_BYTES
CONTEXT_GIB = 0.6  # CUDA's context and the libraries' workspaces. Assumed
NCCL_GIB = 1.0  # buffers of the communicators. Assumed
FRAGMENTS = 0.03  # of the peak, between the blocks of torch's allocator. Assumed


class Parameters(NamedTuple):
    """Numbers of parameters. active: those that compute a token."""

    total: int
    active: int
    dense_per_gpu: int
    experts_per_gpu: int

    @property
    def per_gpu(self) -> int:
        return self.dense_per_gpu + self.experts_per_gpu


def parameters(m: Model) -> Parameters:
    """Count the parameters of the model, and of a rank of its fullest pipeline stage. Tensor parallelism splits some.
    Others are whole on each rank: norms, routers, positions, and the biases of products that are summed over ranks."""
    s, tp, pp = m.shape, m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    met = {part: int(flops / 2) for part, flops in forward_flops_per_token(s).items()}  # matrices that compute a token
    split = sum(met[part] for part in ("attention_projections", "mlp", "shared_experts"))
    normed = (2 * m.num_layers + 1) * m.hidden_size
    if m.qk_layernorm:
        normed += m.num_layers * (s.query_width + s.key_width if m.qk_norm == "all" else 2 * s.head_dim)
    whole = met["router"] + normed * (2 if m.normalization == "LayerNorm" else 1)
    if m.add_bias_linear:
        dense_layers = m.num_layers - s.num_moe_layers
        split += m.num_layers * (s.query_width + 2 * s.key_width) + dense_layers * s.up_products * s.ffn_hidden_size
        whole += (m.num_layers + dense_layers) * m.hidden_size
    places = m.hidden_size * m.seq_length if m.position_embedding_type == "learned_absolute" else 0
    words, untied = met["logits"], m.untie_embeddings_and_output_weights
    everywhere = split + whole + places + words * (2 if untied else 1)
    experts = met["experts"] // s.top_k * s.num_experts
    ends = words if pp > 1 or not untied else 2 * words
    return Parameters(
        total=everywhere + experts,
        active=everywhere + met["experts"],
        dense_per_gpu=math.ceil((split / tp + whole) / pp + ends / tp + places),
        experts_per_gpu=experts // (pp * m.expert_model_parallel_size * m.etp),
    )


class Rows(NamedTuple):
    """Tokens and rows on a rank, for a micro-batch."""

    group: float  # t
    rank: float  # s
    sent: float  # to the ranks of the experts, including this rank: once to each rank with an expert of the token
    received: float  # from other ranks and this one; 0 if the experts are not spread
    expert: float  # R with an even load, or the rows that fit into the buffers
    padded: float  # R and the padding of implementations that pad


def reached(experts: int, ranks: int, top_k: int) -> float:
    """Return the share of the ranks that hold an expert of a token: 1 - C(E - E/ranks, K) / C(E, K)."""
    few, many = sorted((experts // ranks, top_k))  # exchanging the two numbers does not change the ratio
    if few + many > experts:
        return 1.0
    # A product of `few` factors. If there are more than 1024, only 1024 of them are used, evenly spaced.
    factors = min(few, 1024)
    each = few / factors
    logs = (math.log1p(-many / (experts - each * (i + 0.5) + 0.5)) for i in range(factors))
    return -math.expm1(each * sum(logs))


def rows(m: Model) -> Rows:
    """Return how many rows each part of a layer has on a GPU."""
    group = m.micro_batch_size * m.seq_length / m.context_parallel_size
    rank = group / m.tensor_model_parallel_size if m.sequence_parallel else group
    tokens, ep, top_k = group / m.tensor_model_parallel_size * m.etp, m.expert_model_parallel_size, m.moe_router_topk
    expert, sent, received = tokens * top_k, 0.0, 0.0
    if m.num_experts and ep * m.etp > 1:
        sent = received = tokens * ep * reached(m.num_experts, ep, top_k)
        if m.symmetric:  # a place for every token of every rank
            received = tokens * ep
            expert *= min(m.dispatch_rows_factor, ep)
    pads = bool(m.num_experts) and IMPLS[m.impl].pads
    return Rows(group, rank, sent, received, expert, expert + pads * BLOCK * m.num_experts / ep)


def layer_activations(m: Model) -> dict[str, float]:
    """Return the bytes that one layer saves for backward, averaged over layers with and without experts."""
    n, s, e, tp = rows(m), m.shape, m.element_bytes, m.tensor_model_parallel_size
    query, key = s.query_width, s.key_width
    input_ = n.rank * m.hidden_size * e
    if m.recompute_granularity == "full":
        return {"layer inputs": input_}
    # The projections' input; queries, keys and values; the output, and the softmax's sums in float32.
    wide = 2 * query + 2 * key
    if m.position_embedding_type == "rope" or m.qk_layernorm:
        wide += query + key  # new tensors: the projection's output stays too, because the values are a part of it
    if key != query:
        wide += 2 * query  # keys and values, repeated for each head of a group
    sums = 4 * s.num_attention_heads
    if m.qk_layernorm:  # the norms' inputs too, if they are copies and not parts of that output; means and scales
        wide += query + key if m.qk_norm == "all" else query if key != query else 0
        sums += 8 * (2 if m.qk_norm == "all" else s.num_attention_heads + m.num_query_groups)
    attention = input_ + n.group * (wide * e + sums) / tp
    # Both norms save their input, and its mean and scale in float32.
    parts = {"attention": attention, "norms": 2 * input_ + 2 * n.rank * 8}
    if m.hidden_dropout:
        parts["dropout masks"] = 2 * n.rank * m.hidden_size / 8  # bits
    share = s.num_moe_layers / s.num_layers
    if share < 1:
        parts["dense MLP"] = (1 - share) * (input_ + n.group * (s.up_products + 1) * s.ffn_hidden_size * e / tp)
    if share:
        width = s.shared_expert_hidden_size
        # Logits in float32; per pair five indices and a weight.
        parts["router"] = share * n.rank * (4 * s.num_experts + 24 * s.top_k)
        parts["experts"] = share * (expert_activations(m) + n.group * (s.up_products + 1) * width * e / tp)
    return parts


def expert_activations(m: Model) -> float:
    """Return the bytes that the experts of one layer save, by the table of implementations."""
    n, s, e = rows(m), m.shape, m.element_bytes
    impl, width = IMPLS[m.impl], s.moe_ffn_hidden_size / m.etp
    pre_bytes = SAVED_BYTES[m.quantize_rematerialize_num_bits] or e
    sizes = {
        "tokens": (n.rank + n.received) * m.hidden_size * e,
        "rows": n.padded * m.hidden_size * e,
        "pre": n.padded * width * s.up_products * pre_bytes,
        "activation": n.padded * width * e,
        "output": n.padded * m.hidden_size * e,
    }
    kept = set(impl.keeps)
    if m.recompute_activation or m.quantize_rematerialize_num_bits != -1:
        kept.discard("activation")
    if m.recompute_activation and impl.recomputes_pre:
        kept.discard("pre")
    return sum(sizes[name] for name in kept)


def _backward_of_a_layer(m: Model) -> float:
    """Return bytes of a layer's temporary tensors in backward: gradients of the widest products' rows and its input."""
    n, s, e = rows(m), m.shape, m.element_bytes
    up = s.up_products + 1  # gradients of the activation's inputs and of its output
    dense = n.group * up * s.ffn_hidden_size / m.tensor_model_parallel_size
    experts = n.padded * (up * s.moe_ffn_hidden_size / m.etp + m.hidden_size) if s.num_moe_layers else 0
    again = 0.0
    if m.recompute_granularity == "full":
        again = sum(layer_activations(dataclasses.replace(m, recompute_granularity=None)).values())
    return (max(dense, experts) + 2 * n.rank * m.hidden_size) * e + again


def _loss(m: Model) -> tuple[float, float]:
    """Return the bytes of logits that are saved for backward, and of the loss's temporary tensors."""
    n, e, tp = rows(m), m.element_bytes, m.tensor_model_parallel_size
    logits = n.group * m.vocab_size * e / tp
    gradient = 2 * n.group * m.hidden_size * e
    if m.fused_loss:
        return min(logits, m.kept_logits), min(logits, LOSS_CHUNK) + gradient
    return logits + logits / e * 4, logits / e * 4 + gradient


class Memory(NamedTuple):
    """Bytes on the fullest GPU. peak: the most that torch allocates. needed: peak, and memory outside of tensors."""

    parts: dict[str, float]
    outside: dict[str, float]
    error_bar: float

    @property
    def peak(self) -> float:
        """Bytes of all tensors."""
        return sum(self.parts.values())

    @property
    def needed(self) -> float:
        """Bytes of all tensors, and of memory outside of tensors."""
        return self.peak + sum(self.outside.values())


def _activations(m: Model, last: bool) -> dict[str, float]:
    """Return activations of the first or last pipeline stage. The first has most micro-batches, the last the logits."""
    n, pp = rows(m), m.pipeline_model_parallel_size
    held = 1 if last else min(pp, m.micro_batches)
    layers = m.num_layers // pp
    parts = {f"activations: {name}": held * layers * size for name, size in layer_activations(m).items()}
    temporary = _backward_of_a_layer(m)
    if last:
        parts["activations: last norm"] = 2 * n.rank * m.hidden_size * m.element_bytes
        kept, of_loss = _loss(m)
        # The logits are freed before the layers' backward begins, so only the larger of the two counts.
        temporary = max(of_loss, temporary - kept)
        parts["loss: kept logits"] = kept
    if m.hidden_dropout and (pp == 1 or not last):
        parts["activations: embedding"] = held * n.rank * m.hidden_size  # its mask
    parts["temporary tensors"] = temporary
    if m.tensor_model_parallel_size > 1:
        parts["communication: gathered sequence"] = 2 * n.group * m.hidden_size * m.element_bytes
    parts["communication: rows sent and received"] = 2 * n.received * m.hidden_size * m.element_bytes
    return {name: size for name, size in parts.items() if size}


def memory(m: Model) -> Memory:
    """Return what the fullest GPU holds at its peak: at the end of forward, or in the first backward after it."""
    p, e = parameters(m), m.element_bytes
    shards = (m.data_parallel_size * m.context_parallel_size, m.expert_data_parallel_size)
    dense, experts = shards if m.use_distributed_optimizer else (1, 1)
    state = OPTIMIZER_BYTES[m.bf16] * (p.dense_per_gpu / dense + p.experts_per_gpu / experts)
    parts: dict[str, float] = {"weights": e * p.per_gpu, "main gradients": 4 * p.per_gpu, "optimizer state": state}
    stages = [_activations(m, last) for last in {m.pipeline_model_parallel_size == 1, True}]
    fullest = max(stages, key=lambda stage: sum(stage.values()))
    parts |= fullest
    outside = {"allocator's gaps": FRAGMENTS * sum(parts.values()), "CUDA context": CONTEXT_GIB * GIB}
    if m.gpus > 1:
        outside["NCCL buffers"] = NCCL_GIB * GIB
    if m.symmetric:  # two halves, each with rows, ids and weights
        outside["symmetric memory"] = 2 * rows(m).received * (m.hidden_size * e + 8 * m.moe_router_topk)
    return Memory(parts, outside, ERROR_BAR if m.measured_layout else ERROR_BAR_LAYOUT)
