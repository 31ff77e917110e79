"""What a captured step needs that needs no GPU: refusals, memory that stays in place, plain random states."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.training")

from driver import TINY, Driver  # noqa: E402
from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from megablocks.config import ConfigError  # noqa: E402
from megablocks.megatron import cuda_graph  # noqa: E402
from megablocks.megatron.arguments import add_arguments  # noqa: E402
from megablocks.megatron.guards import Guards  # noqa: E402
from megablocks.monitor.expert_load import ExpertLoad  # noqa: E402

GRAPH = ["--train-iters", "4", "--cuda-graph-impl", "full_iteration"]
EXPERTS = "--num-experts 8 "
REFUSED = {
    "--tensor-model-parallel-size 2 --sequence-parallel": "tensor_model_parallel_size=2: must be 1 with --cuda",
    "--pipeline-model-parallel-size 2": "pipeline_model_parallel_size=2: must be 1",
    "--step-batch-size-schedule 0:8": "step_batch_size_schedule='0:8': must be None",
    "--recompute-granularity full": "recompute_granularity='full': must be None",
    "--timing-log-level 1": "timing_log_level=1: must be 0",
    "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer": "overlap_param_gather=True: must be",
    "--check-for-spiky-loss": "check_for_spiky_loss=True: must be False",
    "--save-wgrads-interval 2": "save_wgrads_interval=2: must be None",
    "--rerun-mode report_stats": "rerun_mode='report_stats': must be 'disabled'",
    "--spec megablocks.megatron.specs block_spec": "spec=['megablocks.megatron.specs', 'block_spec']: must be None",
    "--cuda-graph-warmup-steps 0": "cuda_graph_warmup_steps=0: must be >= 1",
    "--cuda-graph-impl local": "cuda_graph_impl='local': must be 'none' or 'full_iteration'",
    "--cuda-graph-impl transformer_engine": "cuda_graph_impl='transformer_engine': must be 'none' or 'full_iteration'",
    "--enable-cuda-graph": "enable_cuda_graph=True: must be left out; use --cuda-graph-impl",
    "--optimizer-cuda-graph": "optimizer_cuda_graph=True: must be left out",
    EXPERTS + "--cuda-graph-modules attn": "cuda_graph_modules=",
    EXPERTS + "--megablocks-layer megatron": "megablocks_layer='megatron': must be 'megablocks'",
    EXPERTS + "--megablocks-layer experts": "megablocks_layer='experts': must be 'megablocks'",
    EXPERTS + "--megablocks-layer tutel": "megablocks_layer='tutel': must be 'megablocks'",
    EXPERTS + "--megablocks-router-type expert_choice": "megablocks_router_type='expert_choice': must be 'topk'",
    EXPERTS + "--megablocks-token-rounding up": "megablocks_token_rounding='up': must be None",
    EXPERTS + "--moe-capacity-factor 1 --megablocks-pad-to-capacity": "megablocks_pad_to_capacity=True: must be False",
    EXPERTS + "--moe-expert-capacity-factor 1": "cuda_graph_impl='full_iteration': needs our routing",
    EXPERTS + "--expert-tensor-parallel-size 2": "megablocks_dispatcher='auto': must be 'symmetric'",
}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.mark.parametrize("flags", REFUSED)
def test_L2_what_a_captured_step_cannot_heed_is_one_line(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as error:
        parser.parse_args([*TINY, *GRAPH, *flags.split()])
    assert str(error.value).startswith(REFUSED[flags]) and "\n" not in str(error.value)


@pytest.mark.parametrize("flags", ["", EXPERTS, EXPERTS + "--moe-capacity-factor 1", "--overlap-grad-reduce"])
def test_a_plan_for_gpus_may_ask_for_graphs(parser: argparse.ArgumentParser, flags: str) -> None:
    assert parser.parse_args([*TINY, *GRAPH, *flags.split()]).cuda_graph_impl == "full_iteration"


def test_experts_on_two_ranks_exchange_without_the_host(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = [*TINY, *GRAPH, "--num-experts", "8", "--expert-model-parallel-size", "2", "--global-batch-size", "8"]
    with pytest.raises(ConfigError, match="megablocks_dispatcher='auto': must be 'symmetric' with"):
        parser.parse_args(flags)
    parser.parse_args([*flags, "--megablocks-dispatcher", "symmetric", "--megablocks-max-tokens", "64"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_L2_without_a_gpu_the_flag_is_one_line(driver: Driver) -> None:
    said = driver.run(*GRAPH, expect=2).text()
    assert "pretrain_gpt: cuda_graph_impl='full_iteration': must be 'none' without a GPU\n" in said


def test_another_driver_cannot_capture() -> None:
    """It would not keep the loss scale in its place."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megablocks.megatron.model_config import check_engine

    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, cuda_graph_impl="full_iteration", cuda_graph_modules=[]
    )
    with pytest.raises(ConfigError, match="must be 'none' outside of megablocks.megatron.pretrain_gpt"):
        check_engine(config)


def test_a_scale_that_changed_moves_back_to_its_place() -> None:
    scaler = SimpleNamespace(_scale=torch.tensor([8.0]))
    optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler), SimpleNamespace()])
    place, places, seen = scaler._scale, {}, []

    def step(*args: object, **kwargs: object) -> str:
        seen.append((scaler._scale is place, float(scaler._scale)))
        scaler._scale = scaler._scale / 2
        return "result"

    for _ in range(3):
        assert cuda_graph._train_step(places, step, None, None, None, optimizer, iteration=1) == "result"
    assert seen == [(True, 8.0), (True, 4.0), (True, 2.0)]


def test_what_a_step_counts_stays_in_one_place_of_memory() -> None:
    load = ExpertLoad(2)
    load.add(torch.tensor([3, 4]), 1)
    counts = load.counts
    load.reset()
    assert load.counts is counts and counts.tolist() == [0, 0, 0]
    args = argparse.Namespace(
        curr_iteration=0, log_interval=9, save_interval=None, exit_interval=None, train_iters=9, fp16=False,
        clip_grad=1, megablocks_nonfinite_guard=True, megablocks_loss_spike_factor=0, megablocks_loss_spike_window=64,
    )  # fmt: skip
    guards = Guards(args)
    guards._defers = True
    places = []
    for _ in range(2):
        guards.observe(torch.tensor(2.5), torch.tensor(4))
        assert guards._step(lambda: (True, torch.tensor(1.0), None))[0]
        places.append(guards._sums)
    assert places[0] is places[1] and [sums.tolist() for _, sums in guards._unread] == [[2.5, 4, 0, 0]] * 2


def test_a_checkpoint_gets_tensors_for_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(5)
    tracker = SimpleNamespace(states_={"a": generator})
    monkeypatch.setattr(cuda_graph, "get_cuda_rng_tracker", lambda: tracker)
    saved = cuda_graph._with_plain_states(lambda: dict(tracker.states_))
    assert tracker.states_ == {"a": generator} and torch.equal(saved["a"], generator.get_state())


def test_graphs_are_dropped_before_their_groups_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = {"training": object(), "validation": object()}
    monkeypatch.setattr(cuda_graph.FullCudaGraphWrapper, "cuda_graph", graphs)
    cuda_graph.release()
    assert graphs == {"training": None, "validation": None}
