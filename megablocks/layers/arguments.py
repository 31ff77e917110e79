"""`Arguments`: a layer's description with the names and defaults of megablocks 0.10, and its conversion to `MoEConfig`.

Intended differences from 0.10: values are checked after the object is filled, also by `from_megatron`. Creating one
needs no GPU, because a layer looks up the current CUDA device when it is built. Losses and router scores are always
computed in float32; `moe_lbl_in_fp32` and `moe_zloss_in_fp32` are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megablocks.config import ConfigError, MoEConfig, check_flags, check_integers, refuse
from megablocks.kinds import QUANTIZED
from megablocks.moe.groups import SharesGroups
from megablocks.ops.activation_table import APPROXIMATIONS, UNARY, Activation

InitFn = Callable[[Tensor], Any]

DEFAULT_ACTIVATION_FN = partial(F.gelu, approximate="tanh")
_DEFAULT_INIT: InitFn = partial(torch.nn.init.normal_, mean=0.0, std=0.02)
GATED = {"gelu": "geglu", "silu": "swiglu", "relu": "reglu"}
_ACTIVATION_FUNCTIONS: dict[Any, str] = {F.gelu: "gelu", F.silu: "silu", F.relu: "relu", torch.relu: "relu"}
# fields of MoEConfig and the fields of Arguments that set them, where the names differ
_RENAMED = {
    "num_experts": "moe_num_experts",
    "top_k": "moe_top_k",
    "output_bias": "bias",
    "recompute_activation": "memory_optimized_mlp",
    "jitter_eps": "moe_jitter_eps",
    "uniform_assignment": "uniform_expert_assignment",
    "load_balancing_loss_weight": "moe_loss_weight",
    "z_loss_weight": "moe_zloss_weight",
    "capacity_factor": "moe_capacity_factor",
}


def activation_of(function: object) -> Activation:
    """Return the activation that an `activation_fn` of megablocks 0.10 computes.

    Functions that are not torch's, such as transformers' ACT2FN, are recognized by their values and slopes.

    Raises:
        ConfigError: a function or name other than gelu, silu, relu and relu2.
    """
    keywords: dict[str, Any] = {}
    inner: Any = function
    while isinstance(inner, partial):
        keywords = {**inner.keywords, **keywords}
        inner = inner.func
    forward: Any = getattr(type(inner), "forward", None)  # a subclass may have its own
    if forward is torch.nn.GELU.forward:
        keywords, inner = {"approximate": inner.approximate}, F.gelu
    inner = {torch.nn.SiLU.forward: F.silu, torch.nn.ReLU.forward: F.relu}.get(forward, inner)
    if isinstance(inner, str) and inner in ("gelu", "silu", "relu", "relu2"):
        return Activation(inner)
    try:
        name = _ACTIVATION_FUNCTIONS[inner]
    except (KeyError, TypeError):
        found = _known_by_values(function)
        if found is None:
            allowed = "gelu, silu, relu, relu2 by name, torch.nn.functional's gelu, silu, relu, or equal to one of them"
            raise ConfigError(f"activation_fn={function!r}: must be one of {allowed}") from None
        return found
    return Activation(name, keywords.get("approximate", "none") if name == "gelu" else "tanh")


def _known_by_values(function: Any) -> Activation | None:
    """Return the activation with the same values and slopes as `function`; None if none, or if it has parameters."""
    ends = torch.tensor([-1e3, -30, 30, 1e3], dtype=torch.float64, device="cpu")
    z = torch.cat([torch.linspace(-8, 8, 64, dtype=torch.float64, device="cpu"), ends])  # without 0, a kink of relu
    try:
        with torch.inference_mode(False), torch.enable_grad():
            if function(z.clone()).requires_grad:
                return None
            x = z.clone().requires_grad_()
            value = function(x)
            (slope,) = torch.autograd.grad(value.sum(), x)
    except Exception:  # a program's function can raise anything; then it is not a known activation
        return None
    ones = torch.ones_like(z)
    for name, (forward, backward) in UNARY.items():
        for approximate in APPROXIMATIONS:
            expected = torch.stack([forward(z, approximate), backward(ones, z, approximate)])
            if value.shape == z.shape and torch.allclose(torch.stack([value.double(), slope]), expected, 1e-5, 1e-6):
                return Activation(name, approximate)
    return None


@dataclasses.dataclass
class Arguments(SharesGroups):
    """The fields of megablocks 0.10's `Arguments`, in the same order (source: its arguments.py).

    The defaults are 0.10's, except for `mlp_impl` and `device`: 0.10's `mlp_impl` is "sparse", which it refuses with
    Triton 3.2 and newer. `device` None means the current CUDA device, or the CPU if there is none.
    `mlp_impl` can also be "auto", "fused", "scatter" or "reference", and `activation_fn` can be a name. The quantize_*
    fields come from 0.5.1 and need no other package. `moe_weight_parallelism` and `weight_parallel_group` come from
    0.5.1 too; the first must be False, and the second is ignored. To shard a layer's weights, wrap it in FSDP.

    Raises:
        ConfigError: one line with the field, its value and what is allowed.
    """

    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[..., Tensor] | str | None = DEFAULT_ACTIVATION_FN

    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: float = 1
    moe_normalize_expert_weights: float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False

    moe_expert_model_parallelism: bool = False
    expert_parallel_group: ProcessGroup | None = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None

    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "grouped"

    fp16: bool = True
    bf16: bool = False
    device: int | str | torch.device | None = None
    init_method: InitFn = _DEFAULT_INIT
    output_layer_init_method: InitFn = _DEFAULT_INIT

    uniform_expert_assignment: bool = False

    shared_expert: bool = False
    fc_cls: Callable[..., torch.nn.Module] = torch.nn.Linear
    fc_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False

    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    quantize_inputs_num_bits: int = -1
    quantize_rematerialize_num_bits: int = -1
    quantize_scatter_num_bits: int = -1
    moe_weight_parallelism: bool = False
    weight_parallel_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.shared_expert_hidden_size is None:
            self.shared_expert_hidden_size = self.ffn_hidden_size
        self.validate()

    def validate(self) -> None:
        """Check every field. Call it again after you set one.

        Raises:
            ConfigError: the first bad field.
        """
        check_integers(self, "num_layers", "pipeline_model_parallel_size")
        if self.num_layers_per_virtual_pipeline_stage is not None:
            check_integers(self, "num_layers_per_virtual_pipeline_stage")
        stages = self.pipeline_model_parallel_size
        if self.num_layers % stages:
            refuse("pipeline_model_parallel_size", stages, f"must divide num_layers={self.num_layers}")
        check_flags(self)
        if self.fp16 and self.bf16:
            refuse("bf16", True, "needs fp16=False (fp16 is True by default): a layer has one dtype")
        if self.mlp_type not in ("mlp", "glu"):
            refuse("mlp_type", self.mlp_type, "must be one of mlp, glu")
        if not callable(self.fc_cls):
            refuse("fc_cls", self.fc_cls, "must be a class of linear layers")
        for name in ("init_method", "output_layer_init_method"):
            if not callable(getattr(self, name)):
                refuse(name, getattr(self, name), "must be a function that fills a tensor in place")
        if not isinstance(self.fc_kwargs, dict):
            refuse("fc_kwargs", self.fc_kwargs, "must be a dict of arguments for fc_cls")
        if self.moe_weight_parallelism:
            refuse("moe_weight_parallelism", True, "must be False: wrap the layer in FSDP to shard its weights")
        if not isinstance(self.expert_parallel_group, ProcessGroup | None):
            refuse("expert_parallel_group", self.expert_parallel_group, "must be a ProcessGroup, or None for all ranks")
        try:
            self.resolve_device()
        except (RuntimeError, TypeError, ValueError):
            allowed = "must be a device, its name such as 'cpu' or 'cuda:1', the number of a GPU, or None"
            refuse("device", self.device, allowed)
        self.to_config()

    def to_config(self) -> MoEConfig:
        """Return the same layer as a `MoEConfig`.

        `load_balancing_loss_weight` is moe_loss_weight / num_layers. So the losses of layers built from the configs add
        up to the result of `batched_load_balancing_loss`. The z-loss is per layer in both.

        Raises:
            ConfigError: a value that no layer accepts; the message uses the field's name in `Arguments`.
        """
        activation, approximate = activation_of(self.activation_fn)
        if self.mlp_type == "glu":
            if activation not in GATED:
                refuse("activation_fn", activation, f"with mlp_type='glu' must be one of {', '.join(GATED)}")
            activation = GATED[activation]
        norm = self.moe_normalize_expert_weights
        fields = {field: getattr(self, name) for field, name in _RENAMED.items()}
        fields |= {field: getattr(self, field) for field in (*QUANTIZED, "hidden_size", "ffn_hidden_size", "mlp_impl")}
        try:
            config = MoEConfig(
                **fields,
                activation=activation,
                gelu_approximate=approximate,
                shared_expert_hidden_size=self.shared_expert_hidden_size if self.shared_expert else None,
                normalize_top_k=1 if norm is True else norm or None,  # 0.10 uses True as the p of a norm
            )
        except ConfigError as error:
            field, rest = str(error).split("=", 1)
            if field == "capacity_factor":  # Arguments has no field for Tutel's rule
                rest = rest.replace(", or use capacity_rule='tutel'", "")
            for other, name in _RENAMED.items():
                rest = rest.replace(f" {other}=", f" {name}=")
            named = {**_RENAMED, "normalize_top_k": "moe_normalize_expert_weights", "gelu_approximate": "activation_fn"}
            raise ConfigError(f"{named.get(field, field)}={rest}") from None
        return config.replace(load_balancing_loss_weight=self.moe_loss_weight / self.num_layers)

    @property
    def dtype(self) -> torch.dtype | None:
        """Parameters' dtype: float16, bfloat16, or None for torch's default."""
        return torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else None

    def resolve_device(self) -> torch.device:
        """Return the device of a layer that is built from these arguments."""
        if self.device is None:
            has_gpu = torch.cuda.is_available()
            return torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        return torch.device("cuda", self.device) if isinstance(self.device, int) else torch.device(self.device)


def from_megatron(megatron_args: Any) -> Arguments:
    """Create `Arguments` from the attributes of a Megatron namespace with the same names.

    Megatron's parser sets a flag that was not given to None. The field then keeps its default. It also does so for the
    name of an init method, as in GPT-NeoX. GPT-NeoX's fp16 and bf16 are sections of a DeepSpeed config.

    Raises:
        ConfigError: as for `Arguments`.
    """
    names = [field.name for field in dataclasses.fields(Arguments)]
    found: dict[str, Any] = {name: getattr(megatron_args, name, None) for name in names}
    for name in ("fp16", "bf16"):
        if isinstance(found[name], dict):
            found[name] = bool(found[name].get("enabled"))
    if found["bf16"] and found["fp16"] is None:
        found["fp16"] = False
    for name in ("init_method", "output_layer_init_method"):
        if isinstance(found[name], str):
            found[name] = None
    return Arguments(**{name: value for name, value in found.items() if value is not None})
