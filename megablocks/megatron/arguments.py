"""The driver's flags on top of Megatron's: `--megablocks-*`, `--data-prefix`, the old fork's names, and defaults.

Every flag of Megatron-LM stays. `add_arguments` is the `extra_args_provider` of Megatron's `parse_and_validate_args`:
it returns a parser that, after parsing, maps the old names to Megatron's, fills defaults that depend on the machine
(no GPU, no Transformer Engine) and refuses bad values with one line, before Megatron's own validation sees them.

| old fork                            | here                                                                         |
|-------------------------------------|------------------------------------------------------------------------------|
| --moe-num-experts N                 | --num-experts N                                                              |
| --moe-top-k K                       | --moe-router-topk K                                                          |
| --moe-loss-weight W                 | --moe-aux-loss-coeff W / num_layers (the old loss is averaged over layers)   |
| --moe-zloss-weight W                | --moe-z-loss-coeff W                                                         |
| --moe-jitter-eps E                  | --moe-input-jitter-eps E                                                     |
| --moe-capacity-factor F             | --megablocks-capacity-factor F                                               |
| --moe-normalize-expert-weights P    | --megablocks-normalize-top-k P                                               |
| --moe-expert-model-parallelism      | --expert-model-parallel-size min(data-parallel size, num_experts)            |
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from megablocks.config import ConfigError
from megablocks.megatron.settings import MegaBlocksSettings

PREFIX = "megablocks_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverSettings:
    """What the driver adds to Megatron's training loop; one `--megablocks-*` flag a field."""

    run_dir: str | None = dataclasses.field(
        default=None, metadata={"help": "folder of loss.csv, loss.png, expert_load.*, env.txt; default: --save"}
    )
    nonfinite_guard: bool = dataclasses.field(
        default=True, metadata={"help": "stop every rank before the optimizer step at a NaN or Inf, naming its layer"}
    )
    loss_spike_factor: float = dataclasses.field(
        default=0.0, metadata={"help": "skip an update whose loss exceeds this times the window's median; 0: off"}
    )
    loss_spike_window: int = dataclasses.field(
        default=64, metadata={"help": "number of past losses in that median (kept in checkpoints)"}
    )
    hang_timeout: float = dataclasses.field(
        default=600.0, metadata={"help": "seconds of silence after which a rank counts as dead; 0: off"}
    )
    verify_checkpoint: bool = dataclasses.field(
        default=True, metadata={"help": "compare every checkpoint file with its recorded sha256 before loading it"}
    )


class _Alias(NamedTuple):
    dest: str
    kind: type
    help: str


ALIASES = {
    "moe_num_experts": _Alias("num_experts", int, "old name of --num-experts"),
    "moe_top_k": _Alias("moe_router_topk", int, "old name of --moe-router-topk"),
    "moe_loss_weight": _Alias("moe_aux_loss_coeff", float, "load-balancing weight, averaged over layers"),
    "moe_zloss_weight": _Alias("moe_z_loss_coeff", float, "old name of --moe-z-loss-coeff"),
    "moe_jitter_eps": _Alias("moe_input_jitter_eps", float, "old name of --moe-input-jitter-eps"),
    "moe_capacity_factor": _Alias(
        PREFIX + "capacity_factor", float, "old name of --megablocks-capacity-factor; unset: dropless"
    ),
    "moe_normalize_expert_weights": _Alias(
        PREFIX + "normalize_top_k", float, "old name of --megablocks-normalize-top-k"
    ),
}

UNSUPPORTED = ("sft", "logits_load_dir", "hybrid_context_parallel", "dataloader_inter_document_masking", "fim_data")
"""Megatron flags that need parts of its pretrain_gpt.py which this driver leaves out."""


def add_arguments(
    parser: argparse.ArgumentParser, parsed: list[argparse.Namespace] | None = None
) -> argparse.ArgumentParser:
    """Megatron's `extra_args_provider`: returns a parser of Megatron's flags and ours.

    parsed: receives the namespace before Megatron validates it, so that an error can name its values.
    """
    driver = DriverParser(parents=[parser], add_help=False, allow_abbrev=False, description="Megatron-LM + MegaBlocks")
    driver.parsed = parsed
    return driver


class _HelpFormatter(argparse.HelpFormatter):
    """Prints help texts of Megatron that are no format strings ("10%)" in 0.19.2) as they stand."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (ValueError, TypeError, KeyError):
            return action.help or ""


class DriverParser(argparse.ArgumentParser):
    """Parses, then resolves: aliases, `--data-prefix`, defaults. Errors are ConfigErrors of one line."""

    parsed: list[argparse.Namespace] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.formatter_class = _HelpFormatter
        group = self.add_argument_group("megablocks")
        group.add_argument("--data-prefix", help="folder made by scripts/prepare_data.py: data, tokenizer, vocabulary")
        for settings in (MegaBlocksSettings, DriverSettings):
            for field in dataclasses.fields(settings):
                _add_flag(group, field)
        group = self.add_argument_group("names of the old Megatron fork")
        for name, alias in ALIASES.items():
            group.add_argument(_flag(name), type=alias.kind, help=alias.help)
        group.add_argument("--moe-expert-model-parallelism", action="store_true", help="spread experts over all ranks")

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            unknown = message.split(": ", 1)[1].split()[0]
            near = difflib.get_close_matches(unknown.split("=")[0], self._option_string_actions, n=1)
            message = f"{unknown}: no such flag" + (f", did you mean {near[0]}?" if near else "")
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        argv: Sequence[str] = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(argv, namespace)
        if not unknown:
            given = {word.split("=")[0] for word in argv if word.startswith("--")}
            actions = self._option_string_actions
            if self.parsed is not None:
                self.parsed.append(parsed)
            parsed.megablocks_explicit = {actions[flag].dest for flag in given if flag in actions}
            resolve(parsed)
        return parsed, unknown


def _flag(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    annotation, text = str(field.type), field.metadata["help"]
    kind = {"int": int, "float": float, "bool": bool}.get(annotation.split(" ")[0], str)
    if field.default is not None:
        text += f" (default: {field.default})"
    if kind is bool:
        group.add_argument(
            _flag(PREFIX + field.name), action=argparse.BooleanOptionalAction, default=field.default, help=text
        )
        return
    choices = field.metadata.get("choices")
    group.add_argument(_flag(PREFIX + field.name), type=kind, default=field.default, choices=choices, help=text)


def settings_from[S: (MegaBlocksSettings, DriverSettings)](args: argparse.Namespace, kind: type[S]) -> S:
    """The settings dataclass `kind` from parsed flags. Its ConfigError names the flag's field."""
    try:
        return kind(**{f.name: getattr(args, PREFIX + f.name) for f in dataclasses.fields(kind)})
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from None


def resolve(args: argparse.Namespace) -> None:
    """Aliases, data folder and defaults into Megatron's own names. ConfigError at what cannot stand."""
    explicit: set[str] = args.megablocks_explicit
    _resolve_aliases(args, explicit)
    if args.data_prefix is not None:
        from megablocks.megatron.data import flags_of_folder

        for dest, value in flags_of_folder(args.data_prefix).items():
            if dest in explicit and getattr(args, dest) != value:
                raise ConfigError(f"{dest}={getattr(args, dest)!r}: {value!r} in --data-prefix {args.data_prefix}")
            setattr(args, dest, value)
    chosen = {k: v for k, v in machine_defaults(args).items() if k not in explicit and getattr(args, k) != v[0]}
    for dest, (value, _) in chosen.items():
        setattr(args, dest, value)
    args.megablocks_automatic = {dest: f"{value} ({why})" for dest, (value, why) in chosen.items()}
    if args.tensor_model_parallel_size * args.context_parallel_size > 1:
        variable = "CUDA_DEVICE_MAX_CONNECTIONS"
        if os.environ.setdefault(variable, "1") == "1":
            args.megablocks_automatic[variable] = "1 (kernels start in the order of their launch)"
    check(args)


def _resolve_aliases(args: argparse.Namespace, explicit: set[str]) -> None:
    for name, alias in ALIASES.items():
        value = getattr(args, name)
        if value is None:
            continue
        if name == "moe_loss_weight":
            if not args.num_layers:
                raise ConfigError(f"moe_loss_weight={value}: needs --num-layers, over which it is averaged")
            value = value / args.num_layers
        twin = getattr(args, alias.dest)
        if isinstance(twin, list) and len(twin) == 1:
            twin = twin[0]
        if alias.dest in explicit and not (isinstance(twin, (int, float)) and math.isclose(twin, value)):
            raise ConfigError(
                f"{name}={getattr(args, name)}: sets {alias.dest}={value:g}, and {_flag(alias.dest)} {twin} is given"
            )
        setattr(args, alias.dest, value)
        explicit.add(alias.dest)
    if args.moe_expert_model_parallelism:
        size = _expert_parallel_size(args)
        if "expert_model_parallel_size" in explicit and args.expert_model_parallel_size != size:
            raise ConfigError(
                f"moe_expert_model_parallelism=True: spreads experts over {size} ranks, and "
                f"--expert-model-parallel-size {args.expert_model_parallel_size} is given too"
            )
        args.expert_model_parallel_size = size
        explicit.add("expert_model_parallel_size")


def _data_parallel_size(args: argparse.Namespace) -> int:
    world = int(os.environ.get("WORLD_SIZE", 1))
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if model < 1 or world % model:
        raise ConfigError(
            f"tensor_model_parallel_size={args.tensor_model_parallel_size}: times pipeline_model_parallel_size="
            f"{args.pipeline_model_parallel_size} and context_parallel_size={args.context_parallel_size} "
            f"must divide the number of processes, {world}"
        )
    return world // model


def _expert_parallel_size(args: argparse.Namespace) -> int:
    ranks, experts = _data_parallel_size(args), args.num_experts or 0
    size = min(ranks, experts)
    if size < 1 or experts % size or ranks % size:
        raise ConfigError(
            f"num_experts={args.num_experts}: with --moe-expert-model-parallelism must be a multiple or a divisor of "
            f"the {ranks} data-parallel ranks"
        )
    return size


def machine_defaults(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Values that a user should not have to know: dest → (value, why). They apply where the flag is not given."""
    out: dict[str, tuple[Any, str]] = {"exit_signal_handler": (True, "SIGTERM saves and exits 0")}
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    if not has_engine:
        why = "Transformer Engine is not installed"
        out["transformer_impl"] = ("local", why)
        out["apply_rope_fusion"] = (False, why)
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        why = "apex is not installed"
        out["gradient_accumulation_fusion"] = (False, why)
        out["no_persist_layer_norm"] = (True, why)
        out["masked_softmax_fusion"] = (False, why)
    if importlib.util.find_spec("one_logger") is None:
        out["enable_one_logger"] = (False, "one_logger is not installed")
    if not torch.cuda.is_available():
        out["distributed_backend"] = ("gloo", "no GPU")
        out["use_cpu_initialization"] = (True, "no GPU")
        out["num_workers"] = (0, "no GPU to keep busy")
    if args.eval_interval is None:
        out["eval_interval"] = (1000, "Megatron divides by it")
    if args.use_distributed_optimizer:
        out["dist_ckpt_optim_fully_reshardable"] = (True, "checkpoints load on any number of processes")
    if args.num_experts:
        out["add_bias_linear"] = (False, "experts without bias")
        out["moe_token_dispatcher_type"] = ("alltoall", "dropless")
        if args.moe_router_score_function == "softmax" and (args.moe_router_topk == 1 or args.moe_num_experts):
            # the old fork's rule, and the only one for top-1, whose weight would else always be 1
            out["moe_router_pre_softmax"] = (True, "softmax over all experts")
    if not has_engine and args.megablocks_attention == "sdpa" and not (args.reset_attention_mask or args.window_size):
        if args.context_parallel_size == 1:
            out["create_attention_mask_in_dataloader"] = (False, "attention is causal without a mask")
    if args.seq_length is not None and args.max_position_embeddings is None:
        out["max_position_embeddings"] = (args.seq_length, "as seq_length")
    if args.megablocks_nonfinite_guard and "rerun_mode" not in args.megablocks_explicit:
        out["rerun_mode"] = ("disabled", "the non-finite guard stops first")
        out["check_for_nan_in_loss_and_grad"] = (False, "the non-finite guard checks")
    return out


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot train, in one line a user can act on. Megatron's validation still follows."""
    for dest in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr"):
        if getattr(args, dest) is None and not args.yaml_cfg and not args.use_checkpoint_args:
            raise ConfigError(f"{dest}=None: {_flag(dest)} is required")
    if args.train_iters is None and args.train_samples is None:
        raise ConfigError("train_iters=None: --train-iters or --train-samples is required")
    positive = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length", "micro_batch_size",
                "global_batch_size", "train_iters", "log_interval", "eval_interval", "save_interval", "lr")  # fmt: skip
    for dest in positive:
        value = getattr(args, dest)
        if value is not None and not value > 0:
            raise ConfigError(f"{dest}={value}: must be > 0")
    for dest in UNSUPPORTED:
        if getattr(args, dest, None):
            raise ConfigError(f"{dest}={getattr(args, dest)}: this driver pretrains GPT models only")
    if args.num_attention_heads and args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ConfigError(
            f"num_attention_heads={args.num_attention_heads}: must divide hidden_size={args.hidden_size}, "
            "or --kv-channels must be given"
        )
    if args.save and args.save_interval is None:
        raise ConfigError(f"save={args.save!r}: needs --save-interval")
    ranks = _data_parallel_size(args)
    if args.global_batch_size and args.global_batch_size % (args.micro_batch_size * ranks):
        raise ConfigError(
            f"global_batch_size={args.global_batch_size}: must be a multiple of micro_batch_size="
            f"{args.micro_batch_size} times the {ranks} data-parallel ranks"
        )
    _check_driver(settings_from(args, DriverSettings))
    settings = settings_from(args, MegaBlocksSettings)
    if args.num_experts:
        _check_experts(args, settings, ranks)
    else:
        _check_dense(args)


def _check_driver(driver: DriverSettings) -> None:
    if driver.loss_spike_factor != 0 and not driver.loss_spike_factor > 1:
        raise ConfigError(f"megablocks_loss_spike_factor={driver.loss_spike_factor}: must be > 1, or 0 for off")
    if driver.loss_spike_window < 4:
        raise ConfigError(f"megablocks_loss_spike_window={driver.loss_spike_window}: must be an integer >= 4")
    if not driver.hang_timeout >= 0:
        raise ConfigError(f"megablocks_hang_timeout={driver.hang_timeout}: must be >= 0 seconds")


def _check_dense(args: argparse.Namespace) -> None:
    for dest in ("moe_top_k", "moe_loss_weight", "moe_capacity_factor", PREFIX + "capacity_factor"):
        if getattr(args, dest) is not None:
            raise ConfigError(f"{dest}={getattr(args, dest)}: needs --num-experts")
    if args.expert_model_parallel_size != 1:
        raise ConfigError(f"expert_model_parallel_size={args.expert_model_parallel_size}: needs --num-experts")


def _check_experts(args: argparse.Namespace, settings: MegaBlocksSettings, ranks: int) -> None:
    if args.num_experts < 1:
        raise ConfigError(f"num_experts={args.num_experts}: must be > 0")
    if not 1 <= args.moe_router_topk <= args.num_experts:
        raise ConfigError(f"moe_router_topk={args.moe_router_topk}: must be 1 to num_experts={args.num_experts}")
    size = args.expert_model_parallel_size
    if size < 1 or args.num_experts % size:
        raise ConfigError(f"expert_model_parallel_size={size}: must divide num_experts={args.num_experts}")
    expert_ranks = ranks * args.tensor_model_parallel_size * args.context_parallel_size
    if expert_ranks % (size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)):
        raise ConfigError(f"expert_model_parallel_size={size}: must divide the {ranks} data-parallel ranks")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ConfigError(
            f"tensor_model_parallel_size={args.tensor_model_parallel_size}: with experts needs --sequence-parallel"
        )
    if settings.capacity_factor is not None and not math.isfinite(settings.capacity_factor):
        raise ConfigError(f"megablocks_capacity_factor={settings.capacity_factor}: must be a finite number")
