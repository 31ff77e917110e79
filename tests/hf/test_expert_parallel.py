"""Experts over two ranks: outputs and gradients equal those of one rank with all experts and all tokens."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megablocks.hf import NAME, OLDEST
from megablocks.testing.launcher import run_distributed_test

pytest.importorskip("transformers", minversion=OLDEST)
if importlib.util.find_spec("transformers.distributed.expert_parallel") is None:
    pytest.skip("this transformers has no EPImplementationInterface: it came with 5.23", allow_module_level=True)

from .test_experts import GPT_OSS, MIXTRAL, E, H, _inputs, _make  # noqa: E402

pytestmark = pytest.mark.xdist_group("ranks")
EXPERTS = 2 * (E // 2)  # over two ranks
TOKENS = (7, 0), (7, 4)


def _cut(experts: nn.Module, first: int, last: int) -> nn.Module:
    """The module with the experts [first, last) alone."""
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach()[first:last].clone()))
    experts.num_experts = last - first
    return experts


def _results(y: Tensor, x: Tensor, weight: Tensor, experts: nn.Module) -> dict[str, Tensor]:
    y.backward(torch.arange(y.numel()).view_as(y) / 50 - 1)
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, **{n: p.grad for n, p in experts.named_parameters()}}


def _rank(case: tuple[str, str], tokens: tuple[int, int], shared: bool) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    import megablocks.hf

    megablocks.hf.register()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    ep_mesh, tp_mesh = mesh["ep"], mesh["ep"] if shared else mesh["tp"]
    half = EXPERTS // 2
    experts = _cut(_make(*case), rank * half, (rank + 1) * half)
    experts.config._experts_implementation = NAME
    x, ids, weight = _inputs(sum(tokens))
    ids = ids % EXPERTS
    if not shared:
        x, ids, weight = (t.detach().split(tokens)[rank] for t in (x, ids, weight))
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = EPImplementationInterface()[NAME](experts, ep_mesh, tp_mesh)(x, ids, weight)
    if shared:  # the same loss on both ranks
        y = y * 1.0
    return _results(y, x, weight, experts)


@pytest.mark.parametrize("case", [MIXTRAL, GPT_OSS], ids=["Mixtral", "GptOss"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_N8_two_ranks_equal_one(case: tuple[str, str], tokens: tuple[int, int]) -> None:
    whole = _cut(_make(*case), 0, EXPERTS)
    x, ids, weight = _inputs(sum(tokens))
    seeds = [torch.arange(n * H).view(n, H) / 50 - 1 for n in tokens]
    y = whole(x, ids % EXPERTS, weight)
    y.backward(torch.cat(seeds))
    ranks = run_distributed_test(_rank, 2, case, tokens, False)
    for name, value in {"y": y, "x": x.grad, "weight": weight.grad}.items():
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), value.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), parameter.grad, rtol=1e-5, atol=1e-5)


def test_N8_ranks_that_share_their_tokens() -> None:
    whole = _cut(_make(*MIXTRAL), 0, EXPERTS)
    x, ids, weight = _inputs(11)
    expected = _results(whole(x, ids % EXPERTS, weight), x, weight, whole)
    ranks = run_distributed_test(_rank, 2, MIXTRAL, (7, 4), True)
    for rank in ranks:
        torch.testing.assert_close(rank["y"], expected["y"], rtol=1e-5, atol=1e-5)
        for name in ("x", "weight"):
            torch.testing.assert_close(rank[name], expected[name], rtol=1e-5, atol=1e-5)
    for name in ("gate_up_proj", "down_proj"):
        torch.testing.assert_close(torch.cat([r[name] for r in ranks]), expected[name], rtol=1e-5, atol=1e-5)


def _logits(folder: str, implementation: str) -> Tensor:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import megablocks.hf

    megablocks.hf.register()
    config: Any = DistributedConfig(ep_size=2, tp_size=2, ep_implementation=implementation)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config, experts_implementation=NAME)
    tokens = torch.arange(2, 26).view(2, 12)
    out = model(tokens).logits
    return out.full_tensor().detach() if hasattr(out, "full_tensor") else out.detach()


@pytest.mark.parametrize("implementation", [NAME, "all_to_all", "all_reduce"])
def test_N8_a_model_with_its_experts_over_two_ranks(implementation: str, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")  # transformers wants it to load a model in parts
    from .test_models import _model

    model = _model("Qwen3Moe", num_experts=4)
    model.save_pretrained(tmp_path)
    model.set_experts_implementation("eager")
    expected = model(torch.arange(2, 26).view(2, 12)).logits
    for logits in run_distributed_test(_logits, 2, str(tmp_path), implementation):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
