"""torchtitan's models with our experts, through its own override seam; skipped where torchtitan is not installed."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from megablocks.config import ConfigError
from megablocks.testing.launcher import run_distributed_test
from megablocks.testing.oracle import experts_oracle, relative_error

pytest.importorskip("torchtitan.config.override", reason="needs torchtitan")  # this folder has its name, too
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models import deepseek_v3, gpt_oss, qwen3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher  # noqa: E402

import megablocks.torchtitan as ours  # noqa: E402

pytestmark = pytest.mark.xdist_group("ranks")  # several processes each: one worker runs them all

FLAG = "megablocks.torchtitan.routed_experts"
D, WIDTH, E, K = 32, 40, 4, 2
NAMES = {"w1_EFD": "w1", "w3_EFD": "v1", "w2_EDF": "w2"}


def experts_of(config, ep_mesh=None):
    """Built and drawn; over a mesh each rank holds its block of the experts."""
    module = config.build()
    generator = torch.Generator().manual_seed(3)
    inner = module.inner_experts
    for name in NAMES:
        weight = torch.randn(getattr(inner, name).shape, generator=generator) / 6
        if ep_mesh is not None:
            weight = weight.chunk(ep_mesh.size())[ep_mesh.get_local_rank()].contiguous()
        setattr(inner, name, torch.nn.Parameter(weight))
    return module


def config_of(dispatcher=LocalTokenDispatcher, **options):
    """torchtitan's routed experts, or with options ours in their place."""
    theirs = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(dim=D, hidden_dim=WIDTH, num_experts=E),
        token_dispatcher=dispatcher.Config(num_experts=E, top_k=K),
    )
    return ours.routed_experts(theirs, **options) if options else theirs


def batch(seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, grad = torch.randn(2, 9, D, generator=draw), torch.randn(2, 9, D, generator=draw)
    scores, ids = torch.rand(2, 9, E, generator=draw).topk(K, dim=-1)
    return x, scores, ids, grad


def call(module, seed=0):
    """Output, and the gradients of x, of the scores and of the parameters."""
    x, scores, ids, grad = batch(seed)
    x.requires_grad_(), scores.requires_grad_()
    y = module(x, scores, ids, torch.bincount(ids.flatten(), minlength=E))
    y.backward(grad)
    found = {"y": y.detach(), "dx": x.grad, "dscores": scores.grad}
    return found | {name: p.grad for name, p in module.inner_experts.named_parameters()}


def expected(module):
    """The same in float64, by the oracle's loop."""
    x, scores, ids, grad = batch()
    x, scores = (t.double().requires_grad_() for t in (x, scores))
    parameters = {name: p.detach().double().requires_grad_() for name, p in module.inner_experts.named_parameters()}
    rows = {ours: parameters[name] for name, ours in NAMES.items()}
    rows["w2"] = rows["w2"].transpose(1, 2)
    rows = {name: w.reshape(-1, D) for name, w in rows.items()}
    token = torch.arange(18).repeat_interleave(K)
    y = experts_oracle(x.view(-1, D), token, ids.flatten(), scores.flatten(), rows, E, "swiglu").view(x.shape)
    y.backward(grad.double())
    found = {"y": y.detach(), "dx": x.grad, "dscores": scores.grad}
    return found | {name: p.grad for name, p in parameters.items()}


@pytest.mark.parametrize(
    "options", [{"mlp_impl": i} for i in ("auto", "fused", "scatter")] + [{"recompute_activation": True}]
)
def test_the_error_is_at_most_that_of_torchtitan(options):
    """Both compute in bfloat16; twice torchtitan's error covers another order of roundings."""
    theirs, mine = experts_of(config_of()), experts_of(config_of(**options))
    exact, of_theirs, of_mine = expected(theirs), call(theirs), call(mine)
    assert of_mine.keys() == exact.keys()
    for name, value in exact.items():
        assert relative_error(of_mine[name], value) <= 2 * relative_error(of_theirs[name], value), name
        assert of_mine[name].dtype == of_theirs[name].dtype and of_mine[name].shape == of_theirs[name].shape


def test_weights_are_not_copied(monkeypatch):
    module, seen = experts_of(config_of(mlp_impl="reference")).bfloat16(), []
    real = ours.COMPUTE["reference"]
    monkeypatch.setitem(ours.COMPUTE, "reference", lambda c: (seen.append(c.parameters), real(c))[1])
    x, scores, ids, _ = batch()
    module(x.bfloat16(), scores, ids, None)
    inner, (p,) = module.inner_experts, seen
    for used, stored in ((p.w1, inner.w1_EFD), (p.v1, inner.w3_EFD), (p.w2.transpose(1, 2), inner.w2_EDF)):
        assert used.data_ptr() == stored.data_ptr() and used.stride() == stored.stride() and used.shape == stored.shape


@pytest.mark.parametrize("options", [{"mlp_impl": i} for i in ("auto", "fused", "scatter")])
def test_the_experts_compile_in_one_graph(options):
    """torchtitan compiles each block so, which allows no break."""
    module = experts_of(config_of(**options))
    eager = call(copy.deepcopy(module))
    module.compile(backend="aot_eager", fullgraph=True)
    for name, value in call(module).items():
        torch.testing.assert_close(value, eager[name], msg=lambda m, n=name: f"{n}: {m}")


def debug_model(flags):
    """torchtitan's debug model, two layers of it. Flex attention has no backward on a CPU, so SDPA is in its place."""
    config = copy.deepcopy(deepseek_v3.model_registry("debugmodel").model)
    del config.layers[2:]
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    log = apply_overrides(OverrideConfig(imports=parse_cli_imports(flags)), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    model.verify_module_protocol()
    return model, log


def train(model, steps):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    positions = torch.arange(32).expand(4, 32)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1], positions=positions)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_the_debug_model_trains_alike():
    (theirs, _), (mine, log) = debug_model([]), debug_model([FLAG])
    assert [line.split()[-1] for line in log] == ["MegaBlocksRoutedExperts.Config"]
    assert {n: p.shape for n, p in theirs.named_parameters()} == {n: p.shape for n, p in mine.named_parameters()}
    assert all(torch.equal(p, q) for p, q in zip(theirs.parameters(), mine.parameters(), strict=True))
    a, b = train(theirs, 8), train(mine, 8)
    assert abs(a[0] - b[0]) < 1e-5 * a[0]
    assert (a - b).abs().max() < 0.01 and a[-1] < a[0] - 1, (a, b)


class _Dims:
    """What `RoutedExperts.parallelize` asks of torchtitan's ParallelDims."""

    def __init__(self, mesh):
        self.mesh = mesh

    def get_optional_mesh(self, name):
        return self.mesh if name == "ep" else None


def _spread():
    set_spmd_backend("partial_dtensor")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    found = []
    for options in ({}, {"mlp_impl": "auto"}):
        module = experts_of(config_of(AllToAllTokenDispatcher, **options), mesh)
        module.parallelize(_Dims(mesh))
        found.append(call(module, seed=dist.get_rank()))
    return found


def test_experts_over_two_ranks_equal_torchtitans():
    for theirs, mine in run_distributed_test(_spread, 2):
        for name, value in theirs.items():
            assert relative_error(mine[name], value) < 0.01, name  # bfloat16 has 8 bits


def test_what_is_refused():
    def routed(config):
        return next(iter(config.traverse(RoutedExperts.Config)))[1]

    assert type(ours.routed_experts(routed(qwen3.model_registry("debugmodel_moe").model))).__qualname__.startswith(
        "Mega"
    )
    with pytest.raises(ValueError, match=r"^inner_experts=GptOssGroupedExperts.Config: must be GroupedExperts.Config"):
        ours.routed_experts(routed(gpt_oss.model_registry("debugmodel").model))
    hybrid = deepseek_v3.model_registry("debugmodel", moe_comm_backend="minimal_async_ep").model
    with pytest.raises(
        ValueError, match=r"^token_dispatcher=Minimal\w+.Config: must be LocalTokenDispatcher.Config or"
    ):
        ours.routed_experts(routed(hybrid))
    with pytest.raises(ConfigError, match="^mlp_impl='fastest': must be one of"):
        config_of(mlp_impl="fastest").build()
