"""Quantized saved activations in whole layers: what gradients lose, what memory gains, and that nothing else changes.

Legend: T tokens, K top-k, R = T·K pairs, H hidden. The layers route R pairs over E experts; "batched" is the
capacity layer with room for the fullest expert.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megablocks.config import ConfigError, MoEConfig
from megablocks.layers import dMoE
from megablocks.ops.quant.quant import GROUP, dequantize_op, packed_bytes, quantize_op
from megablocks.testing.oracle import relative_error

from .harness import build

T, K, H, WIDTH, E = 256, 2, 64, 128, 4
KINDS = ("grouped", "sparse", "batched", "fused")
BOUND = {8: 1e-2, 4: 1e-1}
QUANTIZERS = {
    "inputs": ("experts.w1", "experts.v1"),
    "rematerialize": ("experts.w1", "experts.v1", "experts.w2"),
    "scatter": ("router.layer.weight",),
}


def _quantizers(kind):
    """Those that there are; "fused" keeps no output of the experts that could be quantized."""
    return {name: touched for name, touched in QUANTIZERS.items() if (kind, name) != ("fused", "scatter")}


def _bits(num_bits, *names):
    return {f"quantize_{name}_num_bits": num_bits for name in names}


def _config(activation="swiglu", **changes):
    # pre-activations of unit variance, where the slopes of all activations bend most
    values = dict(hidden_size=H, ffn_hidden_size=WIDTH, num_experts=E, top_k=K, activation=activation, init_std=H**-0.5)
    return MoEConfig(**{**values, **changes})


def _layer(kind, config, device="cpu", dtype=torch.float32):
    layer = build(kind, config, device="cpu")
    return layer.to(device, dtype)


def _step(layer, run=None, device="cpu", dtype=torch.float32):
    """Output, gradients by name, and the bytes that autograd kept, each storage once."""
    draw = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(T, H, generator=draw).to(device, dtype) for _ in range(2))
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    x.requires_grad_()
    layer.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer.forward_with_aux(x)[0] if run is None else run(x)
    y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return y.detach(), grads | {"x": x.grad}, sum(size for size, _ in storages.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2", "swiglu", "geglu", "reglu"])
def test_N1_quantized_gradients_are_near(kind, num_bits, activation, record_property):
    plain = _step(_layer(kind, _config(activation)))
    for name, touched in _quantizers(kind).items():
        y, grads, _ = _step(_layer(kind, _config(activation, **_bits(num_bits, name))))
        assert torch.allclose(y, plain[0], atol=1e-5)
        for parameter, expected in plain[1].items():
            if parameter in touched:
                error = relative_error(grads[parameter], expected)
                assert error <= BOUND[num_bits], (name, parameter)
                # a quantizer that did nothing would pass; relu's slope is exact, so w1 may be
                assert error > BOUND[num_bits] / 10 or (name, parameter) == ("rematerialize", "experts.w1")
            elif parameter != "x" and name != "rematerialize":
                assert relative_error(grads[parameter], expected) < 1e-5, (name, parameter)
    _, grads, _ = _step(_layer(kind, _config(activation, **_bits(num_bits, *_quantizers(kind)))))
    together = {name: relative_error(grads[name], expected) for name, expected in plain[1].items()}
    record_property("errors with all three", together)
    assert max(together.values()) < 1.5 * BOUND[num_bits], together


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_bytes_are_as_predicted(kind, activation, num_bits):
    """By quantizer: what was kept in float32 less what is kept instead, codes and scales."""
    gates = 2 if activation == "swiglu" else 1
    layer = _layer(kind, _config(activation))
    config, experts = layer.config, layer.experts
    if kind == "sparse":  # every expert's rows padded to blocks of 128
        rows = -(-T * K // 128) * 128 + (E - 1) * 128
    elif kind == "batched":
        rows = E * int(
            layer.forward_with_aux(torch.randn(T, H, generator=torch.Generator().manual_seed(0)))[1].metrics["capacity"]
        )
    else:
        rows = T * K
    blocks = rows // 128 * 128 if kind == "sparse" else rows

    def less(rows, width):
        return rows * width * 4 - packed_bytes(num_bits, rows, width)

    activations = 0 if kind == "fused" else blocks * WIDTH * 4  # recomputed, so not kept at all
    # these two layers keep no rows but the tokens, which the router keeps too: see the next test
    predicted = {
        "inputs": -packed_bytes(num_bits, T, H) if kind in ("grouped", "fused") else less(rows, H),
        "rematerialize": gates * less(blocks, WIDTH) + activations,
        "scatter": less(rows, H),
    }
    _, _, plain = _step(layer)
    for name in _quantizers(kind):
        gain = predicted[name]
        _, _, kept = _step(_layer(kind, _config(activation, **_bits(num_bits, name))))
        # the capacity layer's grouped ops keep a few int32 indices, 3 arrays of a row each, that bmm does not need
        indices = 3 * 4 * (rows + E + 1) if kind == "batched" and name != "scatter" else 0
        assert 0 <= kept - (plain - gain) <= indices, (name, plain - kept, gain)
    assert config.top_k == K and experts.num_local_experts == E


@pytest.mark.parametrize("draw", [torch.distributions.Normal(0, 1), torch.distributions.Laplace(0, 1)], ids=str)
def test_N1_eight_bits_lose_less_than_fp8(draw):
    """Less than a third of the error of float8_e4m3fn, alone or with a scale a group, for the same byte a value."""
    x = draw.sample((512, 1024))
    codes, scales = quantize_op(x, 8)
    ours = relative_error(dequantize_op(codes, scales, 8, 1024, x.dtype), x)
    scale = x.view(512, -1, GROUP[8]).abs().amax(2, keepdim=True).expand(-1, -1, GROUP[8]).reshape(x.shape) / 448
    for factor in (1.0, scale):
        assert ours < relative_error((x / factor).to(torch.float8_e4m3fn).float() * factor, x) / 3
    assert codes.numel() + 2 * scales.numel() < 1.04 * x.numel()


@pytest.mark.parametrize("kind", ["grouped", "fused"])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_inputs_shrink_where_nothing_else_keeps_them(num_bits, kind):
    """With a frozen router, or rows that came from another rank, the tokens are kept for w1 and v1 alone."""
    kept = {}
    for bits in (-1, num_bits):
        layer = _layer(kind, _config(**_bits(bits, "inputs")))
        layer.router.requires_grad_(False)
        kept[bits] = _step(layer)[2]
    assert kept[-1] - kept[num_bits] == T * H * 4 - packed_bytes(num_bits, T, H)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parts_keep_nothing_quantized(kind):
    layer = _layer(kind, _config(**_bits(4, *{"inputs", "scatter"} & _quantizers(kind).keys())))
    plain = _layer(kind, _config())
    for model in (layer, plain):
        model.requires_grad_(False)
        model.experts.w2.requires_grad_()
    _, grads, kept = _step(layer)
    _, expected, wanted = _step(plain)
    assert torch.allclose(grads["experts.w2"], expected["experts.w2"], atol=1e-4)
    assert kept - wanted <= 4 * 4 * (E * T * K + E + 1)  # the capacity layer's indices at most


@pytest.mark.parametrize("kind", KINDS)
def test_N5_quantized_layers_under_checkpointing_and_twice(kind):
    layer = _layer(kind, _config(**_bits(8, *_quantizers(kind))))
    y, grads, kept = _step(layer)
    grads = {name: g.clone() for name, g in grads.items()}
    again = _step(layer, lambda x: checkpoint(lambda t: layer.forward_with_aux(t)[0], x, use_reentrant=False))
    assert torch.equal(again[0], y) and again[2] < kept
    assert all(torch.equal(again[1][name], g) for name, g in grads.items())
    x = torch.randn(T, H, requires_grad=True)
    total = layer.forward_with_aux(x)[0].square().sum()
    first = torch.autograd.grad(total, [x, *layer.parameters()], retain_graph=True)
    second = torch.autograd.grad(total, [x, *layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_N9_compile_keeps_quantized_gradients(kind, backend):
    """The experts in one graph: the quantizers are part of it, not lost to its partitioner."""
    from megablocks.ops.routing.dispatch import build_dispatch, make_routing

    layer = _layer(kind, _config(**_bits(4, *_quantizers(kind))))
    draw = torch.Generator().manual_seed(1)
    ids = torch.rand(40, E, generator=draw).topk(K).indices
    x, weight = torch.randn(40, H, generator=draw), torch.rand(40, K, generator=draw)
    dispatch = build_dispatch(make_routing(ids, weight, E))

    def run(x, weight):
        if kind != "batched":
            return layer.experts(x, dispatch, weight.flatten())
        return layer.experts.forward_padded(x[: 10 * E].view(E, 10, H)).flatten(0, 1) * weight[:, :1]

    results = []
    for function in (run, torch.compile(run, fullgraph=True, backend=backend)):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = function(*inputs)
        wanted = [*inputs, layer.experts.w1, layer.experts.v1, layer.experts.w2]
        results.append([y.detach(), *torch.autograd.grad(y.sin().sum(), wanted)])
    for eager, compiled in zip(*results, strict=True):
        assert relative_error(compiled, eager) < 1e-5


def test_a_value_of_no_quantizer_is_refused():
    with pytest.raises(ConfigError, match="quantize_inputs_num_bits=16: must be one of -1, 4, 8"):
        dMoE(_config(quantize_inputs_num_bits=16))


@pytest.mark.parametrize("impl,name", [*(("scatter", name) for name in QUANTIZERS), ("fused", "scatter")])
def test_L2_what_an_mlp_impl_cannot_quantize_is_refused(impl, name):
    field = f"quantize_{name}_num_bits"
    with pytest.raises(ConfigError, match=f"{field}=4: must be -1 with mlp_impl='{impl}', or use"):
        _config(mlp_impl=impl, **_bits(4, name))
    assert getattr(_config(mlp_impl=impl, **_bits(-1, name)), field) == -1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_N1_quantized_bf16_gradients_are_near(kind, num_bits, activation):
    """Against the same layer without a quantizer, both rounding their gradients to bf16."""
    plain = _step(_layer(kind, _config(activation), "cuda", torch.bfloat16), device="cuda", dtype=torch.bfloat16)[1]
    for name, touched in _quantizers(kind).items():
        layer = _layer(kind, _config(activation, **_bits(num_bits, name)), "cuda", torch.bfloat16)
        grads = _step(layer, device="cuda", dtype=torch.bfloat16)[1]
        for parameter in touched:
            if parameter in plain:
                error = relative_error(grads[parameter], plain[parameter])
                assert error <= BOUND[num_bits], (name, parameter)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_N2_ten_quantized_steps_are_bit_identical(kind):
    layer = _layer(kind, _config(**_bits(4, *_quantizers(kind))), "cuda", torch.bfloat16)
    first = _step(layer, device="cuda", dtype=torch.bfloat16)
    grads = {name: g.clone() for name, g in first[1].items()}
    for _ in range(9):
        y, again, _ = _step(layer, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(y, first[0]) and all(torch.equal(again[name], g) for name, g in grads.items())
