"""The parts of a profiled step, by the names that Megatron gives its modules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.training")

from megablocks.megatron import profiling  # noqa: E402
from megablocks.monitor.bounds import FORMULAS, RunSizes  # noqa: E402
from megablocks.monitor.flops import GPTShape  # noqa: E402
from megablocks.monitor.history import History  # noqa: E402

LAYER = "module.module.decoder.layers.3."


@pytest.mark.parametrize(
    "name, part",
    [
        ("", "embedding and loss"),
        ("module.module.embedding", "embedding and loss"),
        ("module.module.output_layer", None),
        ("module.module.decoder", "elementwise"),
        ("module.module.rotary_pos_emb", "elementwise"),
        ("module.module.decoder.final_layernorm", "norms"),
        (LAYER + "pre_mlp_layernorm", "norms"),
        (LAYER + "self_attention", None),
        (LAYER + "self_attention.core_attention", "attention"),
        (LAYER + "self_attention.linear_qkv", "dense products"),
        (LAYER + "mlp.linear_fc2", "dense products"),
        (LAYER + "mlp.router", "routing"),
        (LAYER + "mlp.experts.core", "experts"),
        (LAYER + "mlp.experts.local_experts.0.linear_fc1", "experts"),
        (LAYER + "mlp.shared_experts.linear_fc1", "dense products"),
    ],
)
def test_part_of_a_module(name: str, part: str | None) -> None:
    assert profiling.part_of(name, torch.nn.Module()) == part
    assert part is None or part in FORMULAS


def test_a_layer_with_a_router_belongs_to_the_experts() -> None:
    layer = torch.nn.Module()
    layer.router = torch.nn.Module()
    assert profiling.part_of(LAYER + "mlp", layer) == "experts"


@pytest.mark.parametrize("spread, shards", [(True, (4, 1)), (False, (1, 1))])
def test_run_json_says_how_many_ranks_share_an_optimizer_state(
    spread: bool, shards: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "get_num_microbatches", lambda: 1)
    monkeypatch.setattr(profiling, "shape_of", lambda _: GPTShape(
        num_layers=1, hidden_size=8, seq_length=8, vocab_size=8, num_attention_heads=1, head_dim=8))  # fmt: skip
    args = SimpleNamespace(
        profile_step_end=4, use_distributed_optimizer=spread, data_parallel_size=2, context_parallel_size=2,
        world_size=8, tensor_model_parallel_size=1, pipeline_model_parallel_size=2, expert_model_parallel_size=4,
        expert_tensor_parallel_size=1, global_batch_size=8, seq_length=8, bf16=True, fp16=False,
        position_embedding_type="rope", qk_layernorm=True, qk_l2_norm=False, hidden_dropout=0.1,
        tensorboard_dir=str(tmp_path / "tensorboard"),
    )  # fmt: skip
    model, history = torch.nn.Linear(3, 2), History(tmp_path)
    model.bias.allreduce = False  # as of an expert
    for iteration, rate in ((5, 1.0), (6, 5.0), (7, 7.0)):  # the profile ends with the fifth
        history.add(iteration, {"tokens_per_second": rate})
    profiling.write(args, [model], history)
    run = RunSizes.read(tmp_path / "torch_profile" / "run.json")
    assert (run.optimizer_shards, run.expert_optimizer_shards) == shards
    assert run.qk_norms and run.dropout and run.rotary
    assert (run.parameters, run.expert_parameters, run.tokens_per_second) == (8, 2, 6.0)
