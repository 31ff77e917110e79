"""With batch_invariant a token's output has the same bits whatever else is in the batch."""

import json
from unittest import mock

import pytest
import torch
import triton
from gpu.test_families import in_another_process
from packaging.version import Version

from megablocks.config import ConfigError, MoEConfig
from megablocks.kinds import IMPLS
from megablocks.moe import MoE, dMoE
from megablocks.moe.shared_expert import SharedExpert
from megablocks.ops.grouped.rows_linear import rows_linear, rows_linear_launch
from megablocks.ops.permute.permute_triton import combine_launch
from megablocks.ops.routing.dispatch import build_dispatch, make_routing
from megablocks.ops.routing.topk_triton import route_launch
from megablocks.ops.routing.values import RouterOptions

HAS_GPU = torch.cuda.is_available()
NEEDS_TRITON = pytest.mark.skipif(Version(triton.__version__) < Version("3.6"), reason="the extra dev asks for 3.6")
INVARIANT = [name for name, impl in IMPLS.items() if impl.batch_invariant]
MOST = 130
COUNTS = (1, 2, 3, 7, 16, 33, 64, 65, 129, MOST)


def layer_of(device="cpu", dtype=torch.float32, **changes):
    values = dict(hidden_size=96, ffn_hidden_size=64, num_experts=12, top_k=3, activation="swiglu", mlp_bias=True,
                  normalize_top_k=1.0, shared_expert_hidden_size=72, shared_expert_gate=True, output_bias=True,
                  init_std=0.2, batch_invariant=True)  # fmt: skip
    torch.manual_seed(3)
    layer = dMoE(MoEConfig(**{**values, **changes}), device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() < 2 or name.endswith(("b1", "c1", "b2")):
                parameter.normal_(std=0.1)  # zero biases and gates would hide what they do
    return layer.eval()


def differing(layer, x, counts):
    """(count, place) of the tokens whose output has other bits than in the whole batch x."""
    generator = torch.Generator().manual_seed(5)
    found = []
    with torch.inference_mode():
        whole = layer(x)
        for count in counts:
            picked = torch.randperm(x.shape[0], generator=generator)[:count].to(x.device)
            same = (layer(x[picked]) == whole[picked]).all(1)
            found += [(count, place) for place in (~same).nonzero().flatten().tolist()]
    return found


@pytest.mark.parametrize(
    "changes",
    [*({"mlp_impl": impl} for impl in INVARIANT), {"score_function": "sigmoid", "activation": "gelu", "top_k": 1}],
    ids=str,
)
def test_H4_a_token_is_independent_of_the_batch(changes):
    x = torch.randn(MOST, 96, generator=torch.Generator().manual_seed(1))
    assert differing(layer_of(**changes), x, COUNTS) == []


def test_H4_training_gives_the_same_bits_and_the_usual_gradients():
    losses = dict(load_balancing_loss_weight=0.1, z_loss_weight=0.1)
    layer = layer_of(**losses, expert_score_bias=True, score_function="sigmoid")
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        served = layer(x)
    plain = dMoE(layer.config.replace(batch_invariant=False))
    plain.load_state_dict(layer.state_dict())
    results = []
    for module in (layer.train(), plain.train()):
        leaf = x.clone().requires_grad_()
        y, aux = module.forward_with_aux(leaf)
        (y.square().sum() + sum(aux.losses.values())).backward()
        assert module.router.tokens_since_update.sum() == 9 * 3
        results.append((y.detach(), aux, leaf.grad, {n: p.grad for n, p in module.named_parameters()}))
    (y, aux, dx, grads), (plain_y, plain_aux, plain_dx, plain_grads) = results
    assert torch.equal(y, served)
    torch.testing.assert_close(y, plain_y)
    torch.testing.assert_close(dx, plain_dx, rtol=1e-4, atol=1e-6 * float(dx.abs().max()))
    torch.testing.assert_close(grads, plain_grads, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aux.losses, plain_aux.losses)
    assert aux.metrics.keys() == plain_aux.metrics.keys()
    assert torch.equal(aux.metrics["tokens_per_expert"], plain_aux.metrics["tokens_per_expert"])


def test_no_tokens():
    assert layer_of()(torch.zeros(0, 96)).shape == (0, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_impl": "sparse"}, "mlp_impl='sparse': must be 'auto' or one of 'grouped', 'fused', 'scatter' with "),
        ({"mlp_impl": "reference"}, "mlp_impl='reference': must be 'auto' or one of"),
        ({"router_type": "expert_choice"}, "batch_invariant=True: must be False with router_type='expert_choice': "),
        ({"token_rounding": "nearest"}, "token_rounding='nearest': must be None with batch_invariant=True"),
        ({"capacity_factor": 1.0}, "capacity_factor=1.0: must be None with batch_invariant=True"),
        ({"uniform_assignment": True}, "uniform_assignment=True: must be False with batch_invariant=True"),
        ({"jitter_eps": 0.1}, "jitter_eps=0.1: must be None with batch_invariant=True"),
    ],
)
def test_what_depends_on_the_batch_is_refused(changes, message):
    values = dict(hidden_size=64, ffn_hidden_size=64, num_experts=4, batch_invariant=True)
    with pytest.raises(ConfigError) as raised:
        MoEConfig(**{**values, **changes})
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_capacity_layer_refuses_it():
    with pytest.raises(ConfigError, match="capacity_factor=None: must be a number for MoE"):
        MoE(MoEConfig(hidden_size=8, ffn_hidden_size=8, num_experts=2, batch_invariant=True))


def test_a_shared_expert_of_other_linear_layers_is_refused():
    values = dict(hidden_size=64, ffn_hidden_size=64, num_experts=4, batch_invariant=True)
    config = MoEConfig(**values, shared_expert_hidden_size=64)
    with pytest.raises(ConfigError, match="^batch_invariant=True: needs torch's Linear in the shared expert, not <"):
        SharedExpert(config, linear=torch.nn.LazyLinear)


def test_every_implementation_says_whether_it_can():
    assert INVARIANT == ["grouped", "fused", "scatter"]


@NEEDS_TRITON
@pytest.mark.any_device
@pytest.mark.parametrize("shape", [(50, 12), (33, 1)])
def test_H4_the_kernel_treats_each_row_alone(shape):
    inner, outer = shape
    device = "cuda" if HAS_GPU else "cpu"
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(n, inner, generator=generator).to(device) for n in (37, outer))
    whole = rows_linear_launch(x, w)
    torch.testing.assert_close(whole, x @ w.t(), rtol=1e-5, atol=1e-5)
    others = torch.randn(x.shape, generator=generator).to(device)
    others[5] = x[5]
    assert torch.equal(rows_linear_launch(others, w)[5], whole[5])
    # Under the interpreter a tile's product is numpy's, which may sum the rows at two places of a tile in two orders.
    for start, end in ((0, 1), (0, 20), *(((5, 6), (3, 20), (1, 37)) if HAS_GPU else ())):
        assert torch.equal(rows_linear_launch(x[start:end].contiguous(), w), whole[start:end])


@NEEDS_TRITON
@pytest.mark.any_device
@pytest.mark.parametrize("options", [RouterOptions(3, norm_p=1.0), RouterOptions(3, sigmoid=True), RouterOptions(1)])
def test_H4_router_and_sum_treat_each_token_alone(options):
    """The kernels before and after the experts' products: ids and weights, and the weighted sum of the rows."""
    generator = torch.Generator().manual_seed(2)
    tokens, experts, hidden = 19, 12, 40
    device = "cuda" if HAS_GPU else "cpu"
    logits = torch.randn(tokens, experts, generator=generator).to(device)
    slots = torch.randn(tokens, options.top_k, hidden, generator=generator).to(device)

    def run(start, end):
        out = route_launch(logits[start:end].contiguous(), None, None, options)
        shape = end - start, options.top_k
        d = build_dispatch(make_routing(out.expert.view(shape), out.weight.view(shape), experts))
        rows = slots[start:end].flatten(0, 1)[d.pair.long()]
        return out.expert.view(shape), out.weight.view(shape), combine_launch(rows, out.weight, d)

    whole = run(0, tokens)
    for start, end in ((0, 1), (7, 8), (2, 13), (1, tokens)):
        for part, all_of_it in zip(run(start, end), whole, strict=True):
            assert torch.equal(part, all_of_it[start:end])


def test_the_linear_map_has_the_gradients_of_torchs():
    generator = torch.Generator().manual_seed(2)
    x, w, b = (torch.randn(*n, generator=generator, dtype=torch.float64) for n in ((5, 4), (3, 4), (3,)))
    inputs = [t.requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradcheck(rows_linear, inputs)
    torch.testing.assert_close(rows_linear(*inputs), torch.nn.functional.linear(*inputs))


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), "x (2, 3) and w (4, 5): must be (R, K) and (N, K)"),
        (torch.zeros(2, 3), torch.zeros(4, 3).half(), "w is torch.float16, must be torch.float32 as x is"),
    ],
)
def test_the_linear_map_refuses(x, w, message):
    with pytest.raises(ValueError) as raised:
        rows_linear(x, w)
    assert message in str(raised.value)


def _products_on_hopper():
    """For each implementation on a pretended H200: torch's products, and our kernels. A launch does nothing."""
    from gpu.sanitize import launches
    from gpu.test_families import tensors_pass_for_cuda
    from triton.runtime.jit import JITFunction

    from megablocks.testing.compile_only import compiling_for

    told = {}
    left_out = mock.patch.object(JITFunction, "run", lambda self, *args, **options: None)
    with compiling_for(90), left_out:
        for impl in INVARIANT:
            layer, x = layer_of(dtype=torch.bfloat16, mlp_impl=impl, mlp_bias=False), torch.randn(20, 96).bfloat16()
            with tensors_pass_for_cuda(), launches() as kernels, torch.inference_mode():
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                    layer(x)
            called = {event.name for event in profile.events()}
            words = ("mm", "matmul", "linear", "aten::mv", "aten::dot")
            told[impl] = [sorted(name for name in called if any(w in name for w in words)), sorted(kernels)]
    return told


@NEEDS_TRITON
def test_H4_no_product_on_a_gpu_is_torchs():
    """Router, shared expert and experts: cuBLAS, and torch's grouped GEMM, would choose by the number of rows."""
    for impl, (products, kernels) in in_another_process(__file__).items():
        assert products == [], impl
        assert any(name.endswith("_rows_kernel") for name in kernels), (impl, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", ["auto", *INVARIANT])
def test_H4_on_a_gpu(impl, dtype):
    """Every number of tokens from 1 to 130, of sizes that fill no tile. In bfloat16 cuBLAS chooses by it."""
    layer = layer_of("cuda", dtype, mlp_impl=impl, hidden_size=520, ffn_hidden_size=264, shared_expert_hidden_size=200)
    x = torch.randn(MOST, 520, generator=torch.Generator().manual_seed(1)).to("cuda", dtype)
    assert differing(layer, x, range(1, MOST + 1)) == []


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() < (9, 0), reason="torch has no grouped GEMM")
def test_torchs_grouped_product_is_refused():
    """An expert width that is no multiple of 8: Hopper's kernels leave it to torch."""
    x = torch.randn(MOST, 520, device="cuda", dtype=torch.bfloat16)
    assert differing(layer_of("cuda", torch.bfloat16, hidden_size=520, ffn_hidden_size=260), x, (1, 64)) == []
    with pytest.raises(
        ConfigError, match="batch_invariant=True: on this GPU, for these sizes, needs mlp_impl='scatter'"
    ):
        layer_of("cuda", torch.bfloat16, hidden_size=520, ffn_hidden_size=260, mlp_impl="grouped")(x)


if __name__ == "__main__":
    print(json.dumps(_products_on_hopper()))
