"""Flags: aliases of the old fork, defaults by machine, and one line for each value that is refused."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.training")

from driver import ROOT, TINY, Driver  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorProperties  # noqa: E402

from megablocks.config import ConfigError  # noqa: E402
from megablocks.megatron import failures, pretrain_gpt  # noqa: E402
from megablocks.megatron.arguments import add_arguments, settings_from  # noqa: E402
from megablocks.megatron.settings import DriverSettings, MegaBlocksSettings  # noqa: E402

BASE = [*TINY, "--train-iters", "4"]
MOE = [*BASE, "--num-experts", "8"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def parse(parser: argparse.ArgumentParser, *flags: str, base: list[str] = BASE) -> argparse.Namespace:
    return parser.parse_args([*base, *flags])


@pytest.mark.parametrize(
    ("old", "dest", "value"),
    [
        ("--moe-num-experts 8", "num_experts", 8),
        ("--moe-num-experts=8 --moe-top-k=4", "moe_router_topk", 4),
        ("--moe-num-experts 8 --moe-loss-weight 0.1", "moe_aux_loss_coeff", 0.05),  # averaged over 2 layers
        ("--moe-num-experts 8 --moe-zloss-weight 0.001", "moe_z_loss_coeff", 0.001),
        ("--moe-num-experts 8 --moe-zloss-weight 0", "moe_z_loss_coeff", None),
        ("--moe-num-experts 8 --moe-jitter-eps 0.01", "moe_input_jitter_eps", 0.01),
        ("--moe-num-experts 8 --moe-capacity-factor 1.5", "megablocks_capacity_factor", 1.5),
        ("--moe-num-experts 8 --moe-normalize-expert-weights 1", "megablocks_normalize_top_k", 1.0),
        ("--moe-num-experts 8 --moe-top-k 4 --moe-router-topk 4", "moe_router_topk", 4),
        ("--moe-num-experts 8 --moe-loss-weight 0.1 --moe-aux-loss-coeff 0.05", "moe_aux_loss_coeff", 0.05),
    ],
)
def test_old_names_are_aliases(parser: argparse.ArgumentParser, old: str, dest: str, value: float | None) -> None:
    args = parse(parser, *old.split())
    assert getattr(args, dest) == pytest.approx(value)
    assert dest in args.megablocks_explicit, "so that the flags of a checkpoint do not replace it"


@pytest.mark.parametrize(
    ("world", "tensor", "experts", "size"), [(1, 1, 8, 1), (4, 1, 8, 4), (4, 2, 8, 2), (8, 1, 4, 4)]
)
def test_old_expert_parallelism_spans_the_data_parallel_ranks(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, world: int, tensor: int, experts: int, size: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    flags = f"--moe-num-experts {experts} --moe-expert-model-parallelism --tensor-model-parallel-size {tensor}"
    args = parse(parser, *flags.split(), "--sequence-parallel", "--global-batch-size", "16")
    assert args.expert_model_parallel_size == size


SPLIT = "--num-experts 8 --tensor-model-parallel-size 2 --global-batch-size 16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 12", "global_batch_size=12: must be a multiple of micro_batch_size=2 times the 4 data-"),
        ("--num-experts 6 --moe-expert-model-parallelism", "num_experts=6: must be a multiple or a divisor of the 4"),
        (SPLIT, "tensor_model_parallel_size=2: needs --sequence-parallel with experts"),
        (f"{SPLIT} --sequence-parallel", None),
        (f"{SPLIT} --sequence-parallel --expert-model-parallel-size 4", "expert_model_parallel_size=4: must divide"),
        (f"{SPLIT} --sequence-parallel --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", None),
    ],
)
def test_L2_sizes_must_fit_the_four_ranks(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, message: str | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=f"^{message}"):
        parse(parser, *flags.split())


def test_defaults_fit_the_machine_and_what_is_given_stays(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, "--moe-router-topk", "1", base=MOE)
    assert args.transformer_impl == "local" and args.distributed_backend == "gloo" and args.use_cpu_initialization
    assert not (args.gradient_accumulation_fusion or args.masked_softmax_fusion or args.apply_rope_fusion)
    assert args.no_persist_layer_norm and args.exit_signal_handler and not args.add_bias_linear
    assert args.max_position_embeddings == 32 and not args.create_attention_mask_in_dataloader
    assert args.moe_router_pre_softmax, "after top-1 a softmax would make every weight 1"
    assert not args.check_for_nan_in_loss_and_grad and not args.dist_ckpt_optim_fully_reshardable
    assert args.num_workers == 0
    assert args.megablocks_automatic["distributed_backend"] == "gloo (no GPU)"
    args = parse(parser, "--num-workers", "2", "--rerun-mode", "validate_results", "--reset-attention-mask", base=MOE)
    assert args.num_workers == 2 and args.check_for_nan_in_loss_and_grad and args.create_attention_mask_in_dataloader
    assert "rerun_mode" not in args.megablocks_automatic and not args.moe_router_pre_softmax
    assert parse(parser, "--moe-num-experts", "8").moe_router_pre_softmax, "as in the old fork"
    assert parse(parser, "--no-megablocks-nonfinite-guard", "--num-workers=2").check_for_nan_in_loss_and_grad
    assert parse(parser, "--num-workers=2").num_workers == 2
    assert parse(parser, "--use-distributed-optimizer").dist_ckpt_optim_fully_reshardable
    assert parse(parser, "--quick-geglu", base=MOE).add_bias_linear, "as gpt-oss"
    assert parse(parser, "--window-size", "4,0").create_attention_mask_in_dataloader


@pytest.mark.parametrize("flags", ["--tensor-model-parallel-size 2", "--context-parallel-size 2"])
def test_kernels_of_a_split_model_start_in_order(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given, found in ((None, "1"), ("8", "8")):
        monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
        args = parse(parser, *flags.split())
        assert os.environ[name] == found and (name in args.megablocks_automatic) == (given is None)
        assert args.create_attention_mask_in_dataloader == ("context" in flags)


def test_L1_the_readmes_command_has_all_that_megatron_needs(parser: argparse.ArgumentParser, tiny_data: Path) -> None:
    """Megatron has no default for the interval between evaluations but divides by it."""
    (command,) = re.findall(r"-m megablocks\.megatron\.pretrain_gpt (.+?)\n\n", (ROOT / "README.md").read_text(), re.S)
    flags = command.replace("\\\n", " ").replace("data/stdlib", str(tiny_data)).split()
    flags[flags.index("--expert-model-parallel-size") + 1] = "1"
    args = parser.parse_args(flags)
    assert args.eval_interval == 1000
    assert parser.parse_args([*flags, "--eval-interval", "7"]).eval_interval == 7
    parser.parse_args([*flags, "--vocab-size", str(args.vocab_size)])
    with pytest.raises(ConfigError, match="^vocab_size=7: must be left out with --data-prefix .*, which sets 400"):
        parser.parse_args([*flags, "--vocab-size", "7"])


def test_our_flags_fill_the_settings(parser: argparse.ArgumentParser) -> None:
    flags = "--megablocks-mlp-impl sparse --megablocks-recompute-activation --megablocks-capacity-factor 0"
    args = parse(parser, *flags.split(), "--megablocks-loss-spike-factor", "3", base=MOE)
    settings = settings_from(args, MegaBlocksSettings)
    assert settings.mlp_impl == "sparse" and settings.recompute_activation and settings.capacity_factor == 0
    assert settings_from(args, DriverSettings).loss_spike_factor == 3
    assert settings_from(parse(parser), MegaBlocksSettings) == MegaBlocksSettings()


def test_the_fused_loss_is_off_without_a_gpu_unless_asked_for(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has_gpu, flags, expected in ((False, [], False), (False, ["--megablocks-fused-loss"], True), (True, [], True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        args = parse(parser, *flags)
        assert args.megablocks_fused_loss == expected
        assert ("megablocks_fused_loss" in args.megablocks_automatic) == (not expected)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 64), ("--eval-micro-batch-size 4", 128), ("--tensor-model-parallel-size 2 --sequence-parallel", 32),
        ("--context-parallel-size 2", 32), ("--megablocks-layer experts", None),
    ],
)  # fmt: skip
def test_the_dispatcher_has_room_for_the_largest_micro_batch(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, tokens: int | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert parse(parser, *flags.split(), base=MOE).megablocks_max_tokens == tokens


def test_a_checkpoints_own_flags_may_bring_the_experts(parser: argparse.ArgumentParser) -> None:
    args = parse(parser, *"--use-checkpoint-args --megablocks-mlp-impl grouped".split())
    assert args.megablocks_mlp_impl == "grouped" and args.num_experts is None


def test_a_checkpoints_own_flags_may_bring_the_heads(parser: argparse.ArgumentParser) -> None:
    flags = "--use-checkpoint-args --hidden-size 64 --micro-batch-size 2 --train-iters 4 --lr 1e-2"
    args = parse(parser, *flags.split(), base=[])
    assert args.hidden_size == 64 and args.num_attention_heads is None


def test_all_that_a_resumed_run_compares_are_flags(parser: argparse.ArgumentParser) -> None:
    from megablocks.megatron.checkpoint_io import MODEL, SCHEDULE

    assert {*MODEL, *SCHEDULE} - vars(parse(parser)).keys() == set()


def test_help_lists_the_flags(parser: argparse.ArgumentParser) -> None:
    text = parser.format_help()
    for field in dataclasses.fields(MegaBlocksSettings):
        flag = "--megablocks-" + field.name.replace("_", "-")
        assert re.search(rf"^  {flag}\b", text, re.M), flag
    assert "--moe-paged-stash-buffer-size-factor-cuda" in text, "whose text in Megatron is no format string"


SAVES = "--save /tmp/nowhere --save-interval 4 "
TWO = "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff"
QUANTILES = "--num-experts 8 --moe-router-load-balancing-type quantile_balancing "
REFUSED = {
    "--megablocks-fixed-validation --full-validation": "megablocks_fixed_validation=True: must be left out with",
    "--megablocks-fixed-validation --dataloader-type cyclic": "dataloader_type='cyclic': must be 'single' with",
    "--megablocks-fused-loss-kept-gib -1": "megablocks_fused_loss_kept_gib=-1.0: must be >= 0",
    "--moe-num-experts 8 --num-experts 4": "moe_num_experts=8: sets num_experts=8, but --num-experts 4 is given",
    "--moe-num-experts 8 --moe-top-k 2 --moe-router-topk 1": "moe_top_k=2: sets moe_router_topk=2",
    "--num-experts 8 --moe-loss-weight 0.1 --moe-aux-loss-coeff 1": "moe_loss_weight=0.1: sets moe_aux_loss_coeff=0.05",
    "--moe-top-k 2": "moe_top_k=2: needs --num-experts",
    "--moe-capacity-factor 1": "moe_capacity_factor=1.0: needs --num-experts",
    "--moe-zloss-weight 0.1": "moe_zloss_weight=0.1: needs --num-experts",
    "--moe-jitter-eps 0.1": "moe_jitter_eps=0.1: needs --num-experts",
    "--megablocks-mlp-impl grouped": "megablocks_mlp_impl='grouped': needs --num-experts; a dense model does not read",
    "--megablocks-layer experts": "megablocks_layer='experts': needs --num-experts",
    "--num-experts 8 --megablocks-capacity-rule tutel": "megablocks_capacity_rule='tutel': needs a capacity_factor",
    "--no-megablocks-fused-loss --megablocks-fused-loss-kept-gib 1": "megablocks_fused_loss_kept_gib=1.0: must be left",
    "--num-experts 0.5": "argument --num-experts: invalid int value: '0.5'",
    "--num-experts -2": "num_experts=-2: must be > 0",
    "--num-experts 8 --moe-top-k 9": "moe_router_topk=9: must be 1 to num_experts=8",
    "--num-experts 8 --moe-router-bias-update-rate 0.1": "moe_router_bias_update_rate=0.1: needs --moe-router-enable-",
    "--num-experts 8 --moe-shared-expert-gate": "moe_shared_expert_gate=True: needs --moe-shared-expert-intermediate-",
    "--num-experts 8 --moe-token-drop-policy position": "moe_token_drop_policy='position': needs --moe-expert-capacity",
    "--num-experts 8 --moe-capacity-factor 1 --moe-token-drop-policy probs": "moe_token_drop_policy='probs': needs --",
    "--num-experts 8 --moe-top-k 0": "moe_router_topk=0: must be 1 to num_experts=8",
    "--num-experts 8 --expert-model-parallel-size 2": "expert_model_parallel_size=2: must divide the 1 data-parallel",
    "--tensor-model-parallel-size 3": "tensor_model_parallel_size=3: times pipeline_model_parallel_size=1",
    "--num-layers 0": "num_layers=0: must be > 0",
    "--tensorboard-log-interval 0": "tensorboard_log_interval=0: must be > 0",
    "--lr -1": "lr=-1.0: must be > 0",
    "--lr nan": "lr=nan: must be > 0",
    "--weight-decay -0.1": "weight_decay=-0.1: must be >= 0",
    "--min-lr -1": "min_lr=-1.0: must be >= 0",
    "--clip-grad -1": "clip_grad=-1.0: must be >= 0",
    "--norm-epsilon -1": "layernorm_epsilon=-1.0: must be >= 0",
    "--init-method-std -1": "init_method_std=-1.0: must be >= 0",
    "--lr-warmup-iters -1": "lr_warmup_iters=-1: must be >= 0",
    "--vocab-size 0": "vocab_size=0: must be > 0",
    "--rotary-base 0": "rotary_base=0: must be > 0",
    "--eval-micro-batch-size 0": "eval_micro_batch_size=0: must be > 0",
    "--num-experts 8 --moe-aux-loss-coeff -1": "moe_aux_loss_coeff=[-1.0]: must be >= 0",
    "--num-experts 8 --moe-zloss-weight -1": "moe_z_loss_coeff=-1.0: must be >= 0",
    "--num-experts 8 --moe-jitter-eps 1": "moe_input_jitter_eps=1.0: must be >= 0 and < 1, or the router's input may",
    "--num-experts 8 --moe-input-jitter-eps nan": "moe_input_jitter_eps=nan: must be a finite number",
    "--weight-decay inf": "weight_decay=inf: must be a finite number",
    "--num-experts 8 --moe-aux-loss-coeff nan": "moe_aux_loss_coeff=[nan]: must be a finite number",
    "--num-experts 8 --moe-layer-freq 0": "moe_layer_freq=0: must be >= 1",
    "--num-experts 8 --moe-layer-freq [1,0,1]": "moe_layer_freq=[1, 0, 1]: must have one entry for each of num_",
    "--moe-layer-freq often": "argument --moe-layer-freq: invalid value 'often'; it takes: Frequency between",
    "--attention-backend best": "argument --attention-backend: invalid value 'best'; it takes: Attention backend",
    "--lr-decay-iters 5 --lr-warmup-iters 5": "lr_warmup_iters=5: must be smaller than 5, the iters of the whole",
    "--lr-decay-style WSD": "lr_wsd_decay_iters=None: --lr-wsd-decay-iters is required with --lr-decay-style WSD",
    "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-decay-iters 8": "lr_wsd_decay_iters=9: must be at most 8, the it",
    "--lr-decay-style WSD --lr-wsd-decay-iters 0": "lr_wsd_decay_iters=0: must be at most 100, the iters of the who",
    "--lr-warmup-fraction 1": "lr_warmup_fraction=1.0: must be >= 0 and < 1",
    "--group-query-attention --num-query-groups 3": "num_query_groups=3: must divide num_attention_heads=4",
    "--position-embedding-type rope --kv-channels 7": "kv_channels=7: must be even with --position-embedding-type rope",
    "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 33": "seq_length=33: must be a multiple of 2, its",
    "--position-embedding-type rope --multi-latent-attention --qk-pos-emb-head-dim 7": "qk_pos_emb_head_dim=7: must be",
    "--hidden-dropout 2": "hidden_dropout=2.0: must be 0 to 1",
    "--num-experts 8 --expert-tensor-parallel-size 3": "expert_tensor_parallel_size=3: times expert_model",
    "--yaml-cfg flags.yaml": "yaml_cfg='flags.yaml': must be left out; Megatron's YAML",
    "--tensorboard-dir /dev/null/x": "tensorboard_dir='/dev/null/x': /dev/null is not a folder; choose another path",
    "--data-cache-path /dev/null/x": "data_cache_path='/dev/null/x': /dev/null is not a folder",
    "--num-attention-heads 5": "num_attention_heads=5: must divide hidden_size=32",
    "--global-batch-size 3": "global_batch_size=3: must be a multiple of micro_batch_size=2",
    "--save /tmp/nowhere": "save='/tmp/nowhere': needs --save-interval",
    "--save-interval 10": "save_interval=10: needs --save; without it nothing is kept",
    "--save-wgrads-interval 2": "save_wgrads_interval=2: needs --save; without it nothing is kept",
    "--save-params-interval 0": "save_params_interval=0: must be > 0",
    SAVES + "--non-persistent-save-interval 1": "non_persistent_save_interval=1: needs --non-persistent-ckpt-type",
    SAVES + "--save-dgrads-interval 2": "save_dgrads_interval=2: needs Transformer Engine, which is not installed",
    SAVES + "--save-activations-interval 2": "save_activations_interval=2: needs Transformer Engine, which is not",
    SAVES + "--save-tokens-per-expert-interval 2": "save_tokens_per_expert_interval=2: needs Transformer Engine, which",
    "--num-experts 8 --optimizer muon": "optimizer='muon': must be adam, sgd or lion with our experts, which would",
    "--num-experts 8 --megablocks-layer experts --optimizer soap": "optimizer='soap': must be adam, sgd or lion with",
    "--num-experts 8 --moe-routing-trace-path t": "moe_routing_trace_path='t': must be left out, or use Megatron's own",
    "--check-weight-hash-across-dp-replicas-interval 0": "check_weight_hash_across_dp_replicas_interval=0: must be > 0",
    "--exit-interval -1": "exit_interval=-1: must be >= 0",
    "--exit-duration-in-mins -1": "exit_duration_in_mins=-1: must be >= 0",
    "--num-experts 8 --megablocks-capacity-factor -1": "megablocks_capacity_factor=-1.0: must be >= 0, or use",
    "--num-experts 8 --megablocks-capacity-factor nan": "megablocks_capacity_factor=nan: must be a finite number",
    "--num-experts 8 --megablocks-layer experts --moe-capacity-factor 1": "megablocks_capacity_factor=1.0: must be "
    "None with layer='experts', which does not read it, or use layer='megablocks'",
    "--num-experts 8 --megablocks-layer megatron --megablocks-mlp-impl fused": "megablocks_mlp_impl='fused': must be",
    "--num-experts 8 --megablocks-layer tutel --megablocks-token-rounding up": "megablocks_token_rounding='up': must",
    "--num-experts 8 --moe-token-dispatcher-type allgather": "moe_token_dispatcher_type='allgather': must be 'alltoall'"
    "; our layer exchanges the tokens itself; --megablocks-layer experts is our experts in Megatron's layer",
    "--num-experts 8 --moe-token-dispatcher-type flex": "moe_token_dispatcher_type='flex': must be 'alltoall'; our",
    "--num-experts 8 --moe-enable-deepep": "moe_enable_deepep=True: must be False; our layer exchanges",
    "--num-experts 8 --moe-flex-dispatcher-backend hybridep": "moe_flex_dispatcher_backend='hybridep': must be",
    "--num-experts 8 --moe-hybridep-num-sms 16": "moe_hybridep_num_sms=16: must be None; our layer exchanges",
    "--num-experts 8 --overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm=True: must be False",
    "--num-experts 8 --megablocks-layer experts --delay-wgrad-compute": "delay_wgrad_compute=True: must be False; the "
    "experts' backward computes all gradients, or use Megatron's own layer (--megablocks-layer megatron) with",
    "--num-experts 8 --cuda-graph-impl local": "cuda_graph_impl='local': must be 'none' or 'full_iteration'; graphs of",
    "--num-experts 8 --moe-shared-expert-overlap": "moe_shared_expert_overlap=True: must be False; the shared expert",
    "--num-experts 8 --moe-use-upcycling": "moe_use_upcycling=True: must be left out, or use Megatron's own layer",
    "--transformer-impl transformer_engine": "transformer_impl='transformer_engine': must be 'local'; Transformer",
    "--num-experts 8 --megablocks-layer other": "argument --megablocks-layer: invalid choice: 'other'",
    "--megablocks-loss-spike-factor 1": "megablocks_loss_spike_factor=1.0: must be > 1, or 0 for never",
    "--megablocks-loss-spike-window 2": "megablocks_loss_spike_window=2: must be >= 4",
    "--megablocks-hang-timeout -1": "megablocks_hang_timeout=-1.0: must be >= 0",
    "--moe-num-expert 8": "--moe-num-expert: no such flag, did you mean --moe-num-experts?",
    "--megablocks-keep-checkpoints -1": "megablocks_keep_checkpoints=-1: must be >= 0",
    "--megablocks-keep-checkpoints 2 --ckpt-format torch": "megablocks_keep_checkpoints=2: must be 0 with --ckpt",
    "--async-save --use-persistent-ckpt-worker": "async_save=True: must be left out; this driver's saves are",
    "--full-validation": "full_validation=True: needs --multiple-validation-sets, also for one set, or Megatron fails",
    "--dataloader-type external": "dataloader_type='external': must be 'single' or 'cyclic'",
    "--freeze-all-layers": "freeze_all_layers=True: must be left out, because Megatron does not freeze the model",
    "--hybrid-layer-pattern M*-E": "hybrid_layer_pattern='M*-E': must be left out; this driver pretrains GPT models",
    "--reset-attention-mask --no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader=False: ",
    "--vocab-size 100 --padded-vocab-size 64": "padded_vocab_size=64: must be at least vocab_size=100",
    "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-loss-weight 1": "moe_aux_loss_coeff=0.5: must be",
    QUANTILES + "--moe-router-topk 8": "moe_router_topk=8: must be less than num_experts=8 with moe_router_load_bal",
    QUANTILES + "--moe-router-topk 1 --seq-length 33": "num_experts=8: must divide the 66 pairs of a micro-batch's tok",
    QUANTILES + "aux_loss": "moe_router_load_balancing_type=['quantile_balancing', 'aux_loss']: must be 'quantile_bala",
    QUANTILES + "--moe-router-num-groups 2 --moe-router-group-topk 1": "moe_router_num_groups=2: must be left out wit",
    "--num-experts 8 --moe-aux-loss-coeff 1 2": "moe_aux_loss_coeff=[1.0, 2.0]: must be one number for each of "
    "--moe-router-load-balancing-type, which has 1",
    "--num-experts 8 --moe-aux-loss-coeff 1 2 --moe-router-load-balancing-type aux_loss": "moe_aux_loss_coeff=[1.0, 2",
    "--num-experts 8 --moe-aux-loss-coeff 1 --moe-router-load-balancing-type aux_loss seq_aux_loss": "moe_aux_loss_co"
    "eff=[1.0]: must be one number for each of --moe-router-load-balancing-type, which has 2",
    f"--num-experts 8 {TWO} 1 -1": "moe_aux_loss_coeff=[1.0, -1.0]: must be >= 0",
    f"--num-experts 8 {TWO} 1 nan": "moe_aux_loss_coeff=[1.0, nan]: must be a finite number",
    "--num-experts 8 --megablocks-pad-to-capacity": "megablocks_pad_to_capacity=True: needs a capacity_factor",
    "--moe-expert-model-parallelism": "num_experts=None: must be a multiple or a divisor of the 1 data-parallel ranks",
    "--num-experts 8 --moe-expert-model-parallelism --expert-model-parallel-size 2": "moe_expert_model_parallelism=True"
    ": spreads experts over 1 ranks, but --expert-model-parallel-size 2 is given too",
    "--profile --use-pytorch-profiler": "tensorboard_dir=None: --use-pytorch-profiler writes beside it",
    "--num-experts 8 --megablocks-token-rounding-tile 8": "megablocks_token_rounding_tile=8: needs --megablocks-token-",
    "--num-experts 8 --megablocks-max-tokens 63": "megablocks_max_tokens=63: must be at least 64, the tokens of a",
    "--num-experts 8 --megablocks-dispatch-rows-factor 0": "megablocks_dispatch_rows_factor=0.0: must be > 0",
    "--position-embedding-type rope --rotary-seq-len-interpolation-factor 0": "rotary_seq_len_interpolation_factor=0: ",
    "--rampup-batch-size 4 2 16": "rampup_batch_size=[4, 2, 16]: must be left out, because Megatron does not read",
    "--save-retain-interval 10": "save_retain_interval=10: must be left out, because it removes a checkpoint before",
    "--init-model-with-meta-device": "init_model_with_meta_device=True: needs --use-megatron-fsdp; without it Megatron",
    "--use-torch-fsdp2": "use_torch_fsdp2=True: needs a GPU; leave it out",
    "--heterogeneous-layers-config-path c.json": "heterogeneous_layers_config_path='c.json': must be left out; this "
    "driver builds and counts layers of one size",
    "--sft": "sft=True: must be left out; this driver pretrains GPT models only",
    "--data-prefix /nowhere": "/nowhere: no such data folder",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_L2_each_bad_value_or_combination_is_one_line(parser: argparse.ArgumentParser, flags: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(parser, *flags.split())
    assert str(error.value).startswith(REFUSED[flags])
    assert "\n" not in str(error.value)
    if not flags.startswith("--data"):
        assert isinstance(error.value, ConfigError)


@pytest.mark.parametrize(
    "flags",
    [
        "--moe-token-dispatcher-type alltoall",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0",
        "--moe-router-force-load-balancing",
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1 2",
        "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer",
        "--megablocks-layer experts --moe-token-dispatcher-type allgather",
        "--megablocks-layer experts --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
        "--megablocks-layer megatron --optimizer muon --moe-routing-trace-path t",
        "--megablocks-layer experts --moe-routing-trace-path t",
        "--megablocks-layer megatron --delay-wgrad-compute --moe-token-dispatcher-type allgather",
        "--moe-token-drop-policy probs",  # Megatron's default, in published scripts of dropless models
        "--moe-router-topk 8",
        "--megablocks-max-tokens 64",
        "--vocab-size 100 --padded-vocab-size 100",
        "--num-attention-heads 5 --kv-channels 8",
        "--num-query-groups 3",  # not read without --group-query-attention
        "--megablocks-fused-loss-kept-gib 1",  # off only because this machine has no GPU
        "--spec a b --moe-enable-deepep",
        "--use-checkpoint-args --moe-shared-expert-gate",
    ],
)
def test_flags_that_the_layer_reads_are_taken(parser: argparse.ArgumentParser, flags: str) -> None:
    parse(parser, *flags.split(), base=MOE)


@pytest.mark.parametrize("has_strides", [False, True])
def test_L2_strict_loading_is_refused_where_megatron_fails(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, has_strides: bool
) -> None:
    if has_strides:  # as in torch 2.15
        monkeypatch.setattr(TensorProperties, "strides", None, raising=False)
    else:
        monkeypatch.delattr(TensorProperties, "strides", raising=False)
    parse(parser, "--dist-ckpt-strictness", "assume_ok_unexpected")
    refused = pytest.raises(ConfigError, match="^dist_ckpt_strictness='raise_all': must be assume_ok_unexpected")
    with refused if has_strides else contextlib.nullcontext():
        parse(parser, "--dist-ckpt-strictness", "raise_all")


@pytest.mark.parametrize("dest", ["num_layers", "hidden_size", "seq_length", "micro_batch_size", "lr"])
def test_L2_what_is_required_is_named(parser: argparse.ArgumentParser, dest: str) -> None:
    flag = "--" + dest.replace("_", "-")
    at = BASE.index(flag)
    with pytest.raises(ConfigError, match=f"{dest}=None: {flag} is required"):
        parser.parse_args(BASE[:at] + BASE[at + 2 :])


def test_L2_a_checkpoints_own_flags_bring_no_micro_batch(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ConfigError, match="^micro_batch_size=None: --micro-batch-size is required"):
        parser.parse_args("--use-checkpoint-args --global-batch-size 4 --train-iters 4".split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "train_iters=None: --train-iters or --train-samples is required"),
        ("--train-samples 8 --lr-warmup-samples 8", "lr_warmup_samples=8: must be smaller than 8, the samples of the"),
        ("--train-samples 3 --global-batch-size 4", "train_samples=3: must be at least global_batch_size=4"),
        ("--train-samples 1", "train_samples=1: must be at least global_batch_size=2, the samples of one step"),
        ("--train-samples 4 --global-batch-size 4", None),
        ("--train-samples 3 --global-batch-size 4 --skip-train", None),
        ("--train-samples 3 --step-batch-size-schedule 0:4", None),  # Megatron rounds up here
    ],
)
def test_L2_samples_that_fill_no_batch_are_refused(
    parser: argparse.ArgumentParser, flags: str, message: str | None
) -> None:
    """Megatron would train no step and exit with 0."""
    at = BASE.index("--global-batch-size")
    base = BASE[: BASE.index("--train-iters")]
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        parse(parser, *flags.split(), base=base[:at] + base[at + 2 :])


NULL = "--tokenizer-type NullTokenizer --vocab-size 9"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "data_prefix=None: --data-prefix, --data-path or --mock-data is required"),
        ("--vocab-size 100", "data_prefix=None: --data-prefix, --data-path or --mock-data is required"),
        ("--mock-data", "tokenizer_type=None: --tokenizer-type is required without --data-prefix"),
        ("--data-path a/train --vocab-file vocab.json", "tokenizer_type=None: --tokenizer-type is required without"),
        ("--mock-data --tokenizer-type NullTokenizer", "vocab_size=None: --vocab-size is required with"),
        (f"--train-data-path a {NULL}", "valid_data_path=None: is read by each evaluation"),
        (f"--valid-data-path a {NULL}", "train_data_path=None: is read by each training"),
        (f"--train-data-path a --eval-iters 0 {NULL}", None),
        (f"--valid-data-path a --skip-train {NULL}", None),
        (f"--data-path a --split 100,0,0 {NULL}", "split='100,0,0': holds nothing for valid"),
        (f"--data-path a --split 0,1,1 {NULL}", "split='0,1,1': holds nothing for train"),
        (f"--data-path a --split x {NULL}", "split='x': holds nothing for train"),
        (f"--data-path a --split 9,1 {NULL}", None),
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 100", None),
        ("--mock-data --vocab-file vocab.json --merge-file merges.txt", None),
        ("--mock-data --use-checkpoint-args", None),
    ],
)
def test_L2_a_run_without_data_or_tokenizer_says_so(
    monkeypatch: pytest.MonkeyPatch, flags: str, message: str | None
) -> None:
    """Megatron's default tokenizer would ask for the package wget first."""
    monkeypatch.setitem(sys.modules, "wget", None)
    theirs = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    parser = add_arguments(theirs, needs_data=True)
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        parse(parser, *flags.split())


def test_L2_the_driver_asks_for_data_before_it_builds_a_tokenizer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megablocks.megatron.pretrain_gpt", *BASE]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pretrain_gpt: data_prefix=None: --data-prefix, --data-path or")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--moe-num-expert", "8"), "pretrain_gpt: --moe-num-expert: no such flag, did you mean --moe-num-experts?"),
        # From Megatron's own validation:
        (("--train-samples", "8", "--lr-decay-iters", "4"), "Megatron asks for"),
        (
            ("--num-experts", "3", "--expert-model-parallel-size", "2"),
            "num_experts=3, expert_model_parallel_size=2: Megatron asks for: Number of experts should be a multiple",
        ),
        (
            ("--expert-model-parallel-size", "2"),
            "expert_model_parallel_size=2: Megatron asks for: num_experts must be non None to use expert model parall",
        ),
        # From a layer's config, before Megatron builds the layer:
        (
            ("--num-experts", "8", "--megablocks-mlp-impl", "scatter", "--megablocks-quantize-inputs-num-bits", "8"),
            "pretrain_gpt: megablocks_quantize_inputs_num_bits=8: must be -1 with mlp_impl='scatter', or use",
        ),
    ],
)
def test_L2_a_launch_says_it_once_and_exits_2_before_training(
    driver: Driver, flags: tuple[str, ...], message: str
) -> None:
    run = driver.run("--train-iters", "4", *flags, ranks=2, model=TINY, expect=2)
    lines = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert len(lines) == 1 and message in lines[0]
    assert "Traceback" not in run.text() and "\ntraining ..." not in run.text()


# Flags that fail somewhere in Megatron or torch, and the line that names the flag at fault.
TOLD = {
    "--fp16 --bf16": "bf16=True: Megatron asks for: not args.bf16",
    "--moe-router-group-topk 2": "moe_router_group_topk=2: When using group limited routing, moe_router_num",
    "--moe-router-num-groups 2": "moe_router_group_topk=None: moe_router_num_groups and moe_router_group_topk are",
    "--moe-router-num-groups 2 --moe-router-group-topk 1 --megablocks-token-rounding up": "megablocks_token_rounding="
    "'up': needs moe_router_num_groups=None, not 2",
    "--recompute-granularity selective --recompute-modules foo": "recompute_modules=['foo']: Megatron asks for:",
    "--megablocks-layer experts --moe-routing-trace-path /dev/null/t": "moe_routing_trace_path='/dev/null/t': needs a",
    "--bf16 --fp32-residual-connection": "fp32_residual_connection=True: needs Transformer Engine's norms with torch.b",
    "--weight-decay-incr-style linear": "weight_decay_incr_style='linear': Megatron asks for: args.start_weight_decay",
    "--checkpoint-activations": "checkpoint_activations=True: Megatron ended, for the reason that it printed above",
    "--spec nowhere.module spec": "spec=['nowhere.module', 'spec']: nowhere.module cannot be imported",
    "--spec megablocks.megatron.specs nothing": "spec=['megablocks.megatron.specs', 'nothing']: KeyError: 'nothing'",
    # After Megatron has started:
    "--lr-warmup-init 5": "lr_warmup_init=5.0, lr=0.01: Megatron asks for: self.init_lr <= self.max_lr",
    "--seed -1": "seed=-1: Seed (-1) should be a positive integer.",
    "--adam-beta1 2": "adam_beta1=2.0: ValueError: Invalid beta parameter at index 0: 2.0 in",
    "--num-workers -1": "num_workers=-1: ValueError: num_workers option should be non-negative",
    "--manual-gc --manual-gc-interval -1": "manual_gc_interval=-1: Megatron asks for: Manual garbage",
    "--wandb-project p": "wandb_project='p': ",  # the package is missing, or Megatron joins None to its folder
    "--num-experts 1000000000": "micro_batch_size=2, seq_length=32, num_layers=2, hidden_size=32, ffn_hidden_size=64, "
    "num_experts=1000000000: 8.26e+12 parameters need ",
}


@pytest.mark.parametrize("flags", TOLD)
def test_L2_what_megatron_refuses_is_one_line_that_names_the_flag(driver: Driver, flags: str) -> None:
    run = driver.run("--num-experts", "8", "--train-iters", "4", *flags.split(), model=TINY, expect=2)
    (line,) = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert line.startswith(f"pretrain_gpt: {TOLD[flags]}")
    assert "Traceback" not in run.text() and run.losses() == {}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("--tokenizer-model /dev/null/t", "tokenizer_model='/dev/null/t': tokenizer_path: /dev/null/t is invalid"),
        ("--tokenizer-model /etc/passwd", "tokenizer_model='/etc/passwd': RuntimeError: INTERNAL: could not parse"),
        ("", "Megatron asks for: Tokenizer path must be specified."),
    ],
)
def test_L2_a_missing_or_damaged_tokenizer_names_no_other_flag(driver: Driver, model: str, said: str) -> None:
    flags = f"--train-iters 4 --mock-data --tokenizer-type SentencePieceTokenizer {model}"
    run = driver.run(*flags.split(), model=TINY, data=False, expect=2)
    (line,) = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert line.startswith(f"pretrain_gpt: {said}")


def test_L2_gpus_that_are_not_there_share_no_memory(driver: Driver) -> None:
    flags = ("--train-iters", "4", "--megablocks-dispatcher", "symmetric", "--megablocks-max-tokens", "64")
    run = driver.run(*flags, ranks=2, expect=2)
    (line,) = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert line == "pretrain_gpt: megablocks_dispatcher='symmetric': must be 'auto' or 'all_to_all' without a GPU"


def test_L2_a_full_memory_is_one_line(driver: Driver) -> None:
    flags = "--micro-batch-size 10000000000 --global-batch-size 10000000000 --eval-iters 0"
    run = driver.run("--train-iters", "4", *flags.split(), model=TINY, expect=1)
    (line,) = [line for line in run.text().splitlines() if line.startswith("pretrain_gpt: ")]
    assert line.startswith("pretrain_gpt: rank 0: micro_batch_size=10000000000, seq_length=32, num_layers=2, ")
    assert "out of memory at a tensor of " in line and "take smaller sizes" in line and "Traceback" not in run.text()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': must be a whole number; launch with torchrun"),
        ({"RANK": "2"}, "RANK=2: must be smaller than WORLD_SIZE=2"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1': must be a whole number"),
        ({"MASTER_PORT": None}, "MASTER_PORT=None: must be a whole number"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR=None: must be the host name of rank 0"),
        ({"LOCAL_RANK": None}, None),
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "--max-restarts=3: torchrun keeps",
        ),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "False"}, None),
        ({"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}, None),
        ({}, None),
    ],
)
def test_L2_a_bad_variable_of_torchrun_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str | None], message: str | None
) -> None:
    good = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    for name, value in {**good, "MASTER_ADDR": "localhost", **values}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    line = pretrain_gpt.bad_environment()
    assert line is None if message is None else line is not None and line.startswith(message)


@pytest.mark.parametrize("name", ["MEGABLOCKS_HOPPER", "MEGABLOCKS_COMPILE_AHEAD"])
def test_L2_a_bad_switch_is_named_before_training(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "off")
    with pytest.raises(ValueError, match=f"^{name}=off: must be 0 or 1$"):
        parse(parser)


def test_L2_a_folder_that_cannot_be_written_is_named(
    parser: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    with pytest.raises(ConfigError, match=f"tensorboard_dir='{tmp_path}/a/b': {tmp_path} cannot be written by this"):
        parse(parser, "--tensorboard-dir", str(tmp_path / "a" / "b"))
    cache = ("--data-cache-path", str(tmp_path))
    with pytest.raises(ConfigError, match=f"data_cache_path='{tmp_path}': {tmp_path} cannot be written"):
        parse(parser, *cache)
    (tmp_path / "index.npy").touch()
    assert parse(parser, *cache).data_cache_path == str(tmp_path), "what is there already need only be read"


def test_L5_a_folder_with_checkpoints_is_not_written_over(tmp_path: Path) -> None:
    from megablocks.megatron.checkpoints import choose_checkpoint

    (tmp_path / "iter_0000020").mkdir()
    for load in (None, str(tmp_path / "another run")):
        args = argparse.Namespace(save=str(tmp_path), load=load, ckpt_format="torch_dist", ckpt_step=None)
        with pytest.raises(ConfigError, match=r"holds a run's checkpoints up to iteration 20; resume it with --load"):
            choose_checkpoint(args)


_WITHOUT = """
import importlib.abc, runpy, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in {names!r} else real(name, package)
sys.meta_path.insert(0, Absent())
sys.argv = ["pretrain_gpt"]
runpy.run_module("megablocks.megatron.pretrain_gpt", run_name="__main__")
"""


@pytest.mark.parametrize(
    "names", [("torch", "triton", "megatron"), ("megatron",), ("triton",), ("psutil", "matplotlib")]
)
def test_L3_what_is_missing_is_said_in_one_line(names: tuple[str, ...]) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", _WITHOUT.format(names=names)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    line = done.stderr.strip()
    assert line.startswith("pretrain_gpt: not installed: ")
    assert line.endswith("; run in a checkout: pip install '.[megatron]'")
    assert "\n" not in line
    for name in names:
        assert ("megatron-core" if name == "megatron" else name) in line
    assert done.stdout == ""


def test_flops_agree_with_megatron_but_for_the_router(parser: argparse.ArgumentParser) -> None:
    from megatron.training.training import num_floating_point_operations

    from megablocks.megatron.reporting import shape_of
    from megablocks.monitor.flops import forward_flops_per_token, training_flops_per_token

    flags = "--moe-router-topk 2 --swiglu --moe-layer-freq 2 --group-query-attention --num-query-groups 2".split()
    latent = ["--multi-latent-attention", "--kv-lora-rank", "16", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "12"]
    sparse = [*MOE, *flags, "--moe-shared-expert-intermediate-size", "48"]
    ahead = ["--mtp-num-layers", "2", "--megablocks-layer", "megatron"]  # 2 more layers, as the last one is
    bases = [BASE, sparse, [*BASE, *latent], [*MOE, *latent, "--q-lora-rank", "24"], [*BASE, "--attention-output-gate"]]
    for base in (*bases, [*BASE, *ahead[:2]], [*sparse, *ahead], [*MOE, *ahead]):
        args = parser.parse_args(base)
        args.kv_channels, args.padded_vocab_size, args.moe_ffn_hidden_size = 8, 512, args.moe_ffn_hidden_size or 64
        shape = shape_of(args)
        router = 3 * forward_flops_per_token(shape)["router"]
        if args.multi_latent_attention:  # of the norms of low ranks Megatron counts the weights too
            router -= 6 * args.num_layers * (args.kv_lora_rank + (args.q_lora_rank or 0))
        router -= 6 * 3 * args.hidden_size * (args.mtp_num_layers or 0)  # and here too
        tokens = 8 * args.seq_length
        assert tokens * (training_flops_per_token(shape) - router) == pytest.approx(
            num_floating_point_operations(args, 8), rel=1e-9
        )


def test_the_log_tells_the_allocator_retries_of_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    from megablocks.megatron.reporting import Reporter

    reporter = object.__new__(Reporter)
    reporter._retries, counts = 0, iter((0, 3, 3, 5))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_alloc_retries": next(counts)})
    assert [reporter._new_retries() for _ in range(4)] == [0, 3, 0, 2]


def test_L5_no_other_process_can_take_the_port_of_a_run_of_one_process() -> None:
    """torch chooses the port and opens it in one step."""
    program = (
        "import os; from megablocks.megatron.pretrain_gpt import single_process_environment as one; one()\n"
        "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier()\n"
        "print(os.environ['MASTER_PORT'])"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_L5_an_occupied_port_is_not_blamed_on_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun finds a free port; whoever sets the variables may not."""
    with socket.socket() as taken, pytest.raises(torch.distributed.DistNetworkError) as raised:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        torch.distributed.TCPStore("localhost", taken.getsockname()[1], 2, True)
    line = failures.explain(raised.value, argparse.Namespace(megablocks_explicit={"seed"}, seed=1))
    assert line.startswith(f"MASTER_ADDR=localhost, MASTER_PORT={os.environ['MASTER_PORT']}: The server socket")
    assert line.endswith("; choose a free port")
    lost = failures.explain(torch.distributed.DistStoreError("wait timeout"), argparse.Namespace())
    assert lost.endswith(": wait timeout"), "another rank is at fault, not the port"
