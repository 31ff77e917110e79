"""Tables of rules that say where a format stores a model's tensors. They are used in both directions.

A model is a set of units, the smallest tensors that move: a projection, a norm, a matrix of one expert. A unit has
the name from Hugging Face's Llama, or the name in our layer with the expert's number:

    model.layers.3.self_attn.q_proj.weight     model.layers.3.mlp.experts.5.w1

A format stores tensors. A tensor consists of one or more blocks, one after another. A block contains one or more units
in a packing. A rule describes one tensor, or one tensor of each layer or expert. A unit without a rule is stored
unchanged under its own name. A conversion reads units from one format and writes the tensors of the other.

Legend: V vocabulary, H hidden, N heads, G key-value heads, D size of a head, E experts, I expert width, F dense width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megablocks.checkpoint.atomic import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a conversion must know about a model.

    dense_layers: layers without experts. qk_norm: "head" for a norm over each head of queries and keys, "all" for one
    over all heads of a token, None for none. activation: of the gate, by transformers' name. normalize_top_k: a token's
    weights add up to 1, before top_k_scaling. score_bias: a bias of each expert's score, for the selection only.
    shared_width: width of the shared expert. kv_lora_rank: latent attention, with the four sizes after it; q_lora_rank
    is None if queries have one projection. yarn: factor, mscale and mscale_all_dim of scaled rotary positions. tied:
    the output layer uses the embedding's weight. clamp: the limit of gpt-oss's gate; attention, router and experts then
    have biases, and attention has a sink per head. window: of attention in every second layer, starting with the first.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int
    top_k: int
    expert_width: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    dense_width: int | None = None
    dense_layers: tuple[int, ...] = ()
    qk_norm: str | None = None
    activation: str = "silu"
    normalize_top_k: bool = True
    tied: bool = False
    score_function: str = "softmax"
    score_bias: bool = False
    top_k_scaling: float = 1.0
    num_groups: int | None = None
    group_top_k: int | None = None
    shared_width: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    nope_dim: int | None = None
    rope_dim: int | None = None
    v_dim: int | None = None
    yarn: tuple[float, float, float] | None = None
    clamp: float | None = None
    window: int | None = None

    def units(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every unit, in the order in which they are written."""
        hidden = self.hidden_size
        units: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            layer = {
                "input_layernorm": (hidden,),
                **{f"self_attn.{name}": shape for name, shape in self._attention().items()},
                "post_attention_layernorm": (hidden,),
                **{f"mlp.{name}": shape for name, shape in self._mlp(number).items()},
            }
            for name, shape in layer.items():
                ending = "" if re.search(r"\.[wvbc]\d$|bias$|sinks$", name) else ".weight"
                units[f"model.layers.{number}.{name}{ending}"] = shape
        units["model.norm.weight"] = (hidden,)
        if not self.tied:
            units["lm_head.weight"] = (self.vocab_size, hidden)
        return units

    def _attention(self) -> dict[str, tuple[int, ...]]:
        """Return shapes of a layer's attention by canonical name: plain, or latent with kv_lora_rank."""
        hidden, heads, latent = self.hidden_size, self.num_heads, self.kv_lora_rank
        if latent is None:
            queries, keys = heads * self.head_dim, self.num_kv_heads * self.head_dim
            shapes: dict[str, tuple[int, ...]] = {"q_proj": (queries, hidden), "k_proj": (keys, hidden)}
            shapes |= {"v_proj": (keys, hidden), "o_proj": (hidden, queries)}
            if self.qk_norm is not None:
                per_head = self.qk_norm == "head"
                shapes |= {"q_norm": (self.head_dim if per_head else queries,)}
                shapes |= {"k_norm": (self.head_dim if per_head else keys,)}
            if self.clamp is not None:
                shapes |= {f"{name}.bias": (shape[0],) for name, shape in shapes.items()} | {"sinks": (heads,)}
            return shapes
        assert self.nope_dim is not None and self.rope_dim is not None and self.v_dim is not None
        queries = heads * (self.nope_dim + self.rope_dim)
        shapes = {"q_proj": (queries, hidden)}
        if self.q_lora_rank is not None:
            rank = self.q_lora_rank
            shapes = {"q_a_proj": (rank, hidden), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
        return shapes | {
            "kv_a_proj_with_mqa": (latent + self.rope_dim, hidden),
            "kv_a_layernorm": (latent,),
            "kv_b_proj": (heads * (self.nope_dim + self.v_dim), latent),
            "o_proj": (hidden, heads * self.v_dim),
        }

    def _mlp(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return shapes of a layer's MLP by canonical name: dense, or router, experts and shared expert."""

        def gated(width: int | None, prefix: str = "") -> dict[str, tuple[int, ...]]:
            assert width is not None
            rows, columns = (width, self.hidden_size), (self.hidden_size, width)
            return {f"{prefix}gate_proj": rows, f"{prefix}up_proj": rows, f"{prefix}down_proj": columns}

        if layer in self.dense_layers:
            return gated(self.dense_width)
        shapes: dict[str, tuple[int, ...]] = {"router.layer": (self.num_experts, self.hidden_size)}
        if self.score_bias:
            shapes["router.expert_score_bias"] = (self.num_experts,)
        # all experts' w1, then all v1, then all w2: a reader keeps only one of these matrices in memory
        matrix, width = (self.expert_width, self.hidden_size), (self.expert_width,)
        experts: dict[str, tuple[int, ...]] = {"w1": matrix, "v1": matrix, "w2": matrix}
        if self.clamp is not None:
            shapes["router.layer.bias"] = (self.num_experts,)
            experts |= {"b1": width, "c1": width, "b2": (self.hidden_size,)}
        shapes |= {f"experts.{e}.{name}": experts[name] for name in experts for e in range(self.num_experts)}
        return shapes | (gated(self.shared_width, "shared_expert.") if self.shared_width else {})


class Packing(NamedTuple):
    """How a block stores its units.

    pack: (model, units) → the block. unpack: (model, block, the units' shapes) → the units.
    """

    pack: Callable[[Model, list[Tensor]], Tensor]
    unpack: Callable[[Model, Tensor, list[tuple[int, ...]]], list[Tensor]]


def _pack_qkv(model: Model, units: list[Tensor]) -> Tensor:
    """Pack q, k and v as Megatron stores them: for each group of queries its q, then its k and v."""
    groups = [unit.unflatten(0, (model.num_kv_heads, -1)) for unit in units]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _unpack_qkv(model: Model, block: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Unpack q, k and v from Megatron's matrix, see `_pack_qkv`."""
    rows = [shape[0] // model.num_kv_heads for shape in shapes]
    return [part.flatten(0, 1) for part in block.unflatten(0, (model.num_kv_heads, -1)).split(rows, dim=1)]


PACKINGS = {
    "same": Packing(lambda _, units: units[0], lambda _, block, shapes: [block]),
    "transposed": Packing(lambda _, units: units[0].t(), lambda _, block, shapes: [block.t()]),
    "rows": Packing(
        lambda _, units: torch.cat(units), lambda _, block, shapes: list(block.split([shape[0] for shape in shapes]))
    ),
    # gpt-oss: columns of gate and up projection alternate, transposed
    "alternating": Packing(
        lambda _, units: torch.stack(units, 1).flatten(0, 1).t(),
        lambda _, block, shapes: list(block.t().unflatten(0, (-1, 2)).unbind(1)),
    ),
    "qkv": Packing(_pack_qkv, _unpack_qkv),  # for each key-value head: its queries, its key, its value
}


class Rule(NamedTuple):
    """Where a format stores units.

    stored: name of a tensor; {l} means a layer, {e} an expert.
    units: names of a block's units; if they contain {l} or {e} and `stored` does not, the tensor has a block for each.
    merged: the blocks are rows of one matrix; there is no dimension for the blocks.
    """

    stored: str
    units: tuple[str, ...]
    packing: str = "same"
    merged: bool = False


class Block(NamedTuple):
    """One block of a tensor. at: its index in the tensor, over layers, experts, both or nothing."""

    at: tuple[int, ...]
    units: tuple[str, ...]


@dataclass
class Stored:
    """A tensor of a format. block_shape: shape of one stored block, without the dimensions of its index."""

    name: str
    rule: Rule
    block_shape: tuple[int, ...]
    blocks: list[Block] = field(default_factory=list)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of layers, of experts, or of both, that the blocks belong to."""
        return tuple(len({block.at[axis] for block in self.blocks}) for axis in range(len(self.blocks[0].at)))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.rule.merged:
            return (math.prod(self.numbers) * self.block_shape[0], *self.block_shape[1:])
        return (*self.numbers, *self.block_shape)


def layout_of(model: Model, rules: Iterable[Rule]) -> dict[str, Stored]:
    """Return every tensor that a format stores for a model, by name."""
    units = model.units()
    place: dict[str, tuple[Rule, str, Block]] = {}
    for rule in rules:
        axes = [axis for axis in "le" if f"{{{axis}}}" in rule.units[0]]
        numbers = {"l": range(model.num_layers), "e": range(model.num_experts)}
        for layer in numbers["l"] if "l" in axes else (0,):
            for expert in numbers["e"] if "e" in axes else (0,):
                at = {"l": layer, "e": expert}
                names = tuple(name.format(**at) for name in rule.units)
                if names[0] in units:
                    index = tuple(at[axis] for axis in axes if f"{{{axis}}}" not in rule.stored)
                    place |= dict.fromkeys(names, (rule, rule.stored.format(**at), Block(index, names)))
    found: dict[str, Stored] = {}
    for unit in units:
        rule, name, block = place.get(unit) or (Rule(unit, (unit,)), unit, Block((), (unit,)))
        if unit != block.units[0]:
            continue  # its block was already added
        if name not in found:
            empty = [torch.empty(units[one], device="meta") for one in block.units]
            found[name] = Stored(name, rule, tuple(PACKINGS[rule.packing].pack(model, empty).shape))
        found[name].blocks.append(block)
    return found


class Source(Protocol):
    """A model in some format, read block by block."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read_block(self, stored: Stored, block: Block) -> Tensor: ...


def check_names(source: Source, layout: Mapping[str, Stored], where: str, ignored: Callable[[str], bool]) -> None:
    """Raise CheckpointError if a source lacks a tensor, has an unknown one, or has one with another shape."""
    shapes = {name: shape for name, shape in source.shapes().items() if not ignored(name)}
    missing, unknown = sorted(layout.keys() - shapes.keys()), sorted(shapes.keys() - layout.keys())
    for names, what in ((missing, "missing"), (unknown, "unknown")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            asked = f"a model of these sizes has {len(layout)} tensors"
            if names == ["lm_head.weight"]:
                asked = "tie_word_embeddings in config.json must be false if the files hold this key, true if not"
            raise CheckpointError(f"{where}: {names[0]}: {what} key{more}; {asked}")
    for name, stored in layout.items():
        if shapes[name] != stored.shape:
            sizes = "the sizes in config.json or in the run's flags do not fit these weights"
            raise CheckpointError(f"{where}: {name} has shape {shapes[name]}, must be {stored.shape}: {sizes}")


class Units:
    """The units of a source. A unit is read on request; the last block stays in memory for its other units."""

    def __init__(self, model: Model, source: Source, layout: Mapping[str, Stored]) -> None:
        self.model, self.source, self.shapes = model, source, model.units()
        self.place = {
            unit: (stored, block, position)
            for stored in layout.values()
            for block in stored.blocks
            for position, unit in enumerate(block.units)
        }
        assert self.place.keys() == self.shapes.keys(), "a format stores every unit once"
        self._last: tuple[Block | None, list[Tensor]] = (None, [])

    def dtype(self, unit: str) -> torch.dtype:
        return self.source.dtype(self.place[unit][0].name)

    def read(self, unit: str) -> Tensor:
        stored, block, position = self.place[unit]
        if self._last[0] is not block:
            shapes = [self.shapes[one] for one in block.units]
            unpack = PACKINGS[stored.rule.packing].unpack
            self._last = block, unpack(self.model, self.source.read_block(stored, block), shapes)
        return self._last[1][position]

    def dtype_of(self, stored: Stored) -> torch.dtype:
        """Return the dtype of a tensor of the other format. Raises CheckpointError if its units' dtypes differ."""
        dtypes = {unit: self.dtype(unit) for block in stored.blocks for unit in block.units}
        (first, dtype), *_ = dtypes.items()
        for unit, other in dtypes.items():
            if other != dtype:
                raise CheckpointError(f"{unit} is {other}, {first} is {dtype}: {stored.name} needs one dtype for both")
        return dtype

    def block(self, stored: Stored, block: Block) -> Tensor:
        """Return a block of a tensor of the other format."""
        return PACKINGS[stored.rule.packing].pack(self.model, [self.read(unit) for unit in block.units])
