"""Gradients added to `main_grad`, as Megatron's data parallelism gives it: every implementation, against autograd's."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megablocks.testing.oracle import relative_error

from .harness import KINDS, batch, build, config_of

MATRICES = ("experts.w1", "experts.v1", "experts.w2")
BATCHES = 3


def _give_main_grads(layer, dtype=torch.float32):
    """As DistributedDataParallel does: parts of buffers, here with something in them, and a hook that adds the rest."""
    for name, p in layer.named_parameters():
        if name in MATRICES:
            buffer = torch.randn(p.numel() + 1, generator=torch.Generator().manual_seed(len(name)), dtype=dtype)
            p.main_grad = buffer[1:].view(p.shape)
            p.grad_added_to_main_grad = False
            p.register_post_accumulate_grad_hook(_hook)


def _hook(p):
    if p.grad is not None and (not p.grad_added_to_main_grad or getattr(p, "zero_out_wgrad", False)):
        p.main_grad.add_(p.grad)
    p.hooked = getattr(p, "hooked", 0) + 1
    p.grad = None


def _accumulate(layer, run=None, dtype=torch.float32):
    """main_grad of the experts' matrices, and the other parameters' gradients, after three micro-batches."""
    for seed in range(BATCHES):
        x, dy = (t.to(dtype) for t in batch(layer.config, 13, seed))
        y = (run or (lambda x: layer.forward_with_aux(x)[0]))(x.requires_grad_())
        y.backward(dy)
    return {n: p.main_grad if n in MATRICES else p.grad for n, p in layer.named_parameters()}


def _both(kind, run_of=lambda layer: None, prepare=lambda layer: None, dtype=torch.float32, **options):
    """(with the fusion, without): the layer and what `_accumulate` leaves."""
    out = []
    for fusion in (True, False):
        layer = build(kind, config_of(kind, gradient_accumulation_fusion=fusion), **options).to(dtype)
        prepare(layer)
        _give_main_grads(layer, torch.promote_types(dtype, torch.float32))
        out.append((layer, _accumulate(layer, run_of(layer), dtype)))
    return out


def _equal(fused, plain):
    for name, grad in plain[1].items():
        assert relative_error(fused[1][name], grad) < 1e-6, name
    for name, p in fused[0].named_parameters():
        if name in MATRICES:
            assert p.grad_added_to_main_grad and p.grad is None and p.hooked == BATCHES, name
    assert not any(p.grad_added_to_main_grad for n, p in plain[0].named_parameters() if n in MATRICES)


@pytest.mark.parametrize("kind", KINDS)
def test_N6_main_grad_takes_what_the_hook_would_add(kind, poison):
    _equal(*_both(kind))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["grouped", "fused"])
def test_N6_main_grad_under_activation_checkpointing(kind, reentrant):
    def run_of(layer):
        return lambda x: checkpoint(lambda t: layer.forward_with_aux(t)[0], x, use_reentrant=reentrant)

    _equal(*_both(kind, run_of))


@pytest.mark.parametrize("scale", [0.25, 1 / 3])  # of the output's gradient, of the parameters'
@pytest.mark.parametrize("kind", ["grouped", "fused"])
def test_N6_main_grad_of_scaled_gradients(kind, scale):
    def prepare(layer):
        layer.experts.grad_scale = scale

    _equal(*_both(kind, prepare=prepare))


@pytest.mark.parametrize("kind", ["grouped", "fused"])
def test_N6_main_grad_under_autocast(kind):
    def run_of(layer):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return layer.forward_with_aux(x)[0].float()

        return run

    fused, plain = _both(kind, run_of)
    for name, grad in plain[1].items():
        assert relative_error(fused[1][name], grad) < 0.01, name
    assert all(p.grad_added_to_main_grad for n, p in fused[0].named_parameters() if n in MATRICES)


def test_N6_main_grad_changes_implementation_between_micro_batches():
    """As "auto" does where micro-batches differ in dtype: the flag says of all that they were added."""
    kinds = ("fused", "sparse", "fused")
    layers = []
    for fusion in (True, False):
        layer = build("sparse", config_of("sparse", gradient_accumulation_fusion=fusion))
        _give_main_grads(layer)
        following = iter(kinds)
        layer.experts.mlp_impl_for = lambda following=following, **_: next(following)
        layers.append((layer, _accumulate(layer)))
    _equal(*layers)


def test_N1_main_grads_in_float32_are_not_rounded_to_the_parameters_type():
    """Against the same bfloat16 layer in float64; the hook adds gradients that were rounded to bfloat16."""
    (_, fused), (_, plain) = _both("fused", dtype=torch.bfloat16)
    layer = build("fused", config_of("fused")).bfloat16().double()
    _give_main_grads(layer)
    for p in layer.experts.parameters():
        if hasattr(p, "main_grad"):
            p.main_grad = p.main_grad.double()
    for seed in range(BATCHES):
        x, dy = (t.bfloat16().double() for t in batch(layer.config, 13, seed))
        layer.forward_with_aux(x)[0].backward(dy)
    truth = layer.experts.w2.main_grad
    assert relative_error(fused["experts.w2"], truth) < 0.02
    assert fused["experts.w2"].dtype == torch.float32
    rounded = fused["experts.w2"].bfloat16().float()
    assert not torch.equal(rounded, fused["experts.w2"]) and not torch.equal(plain["experts.w2"], fused["experts.w2"])


@pytest.mark.parametrize("kind", ["grouped", "fused"])
def test_main_grads_of_another_type_are_added_to_all_the_same(kind):
    """Without --accumulate-allreduce-grads-in-fp32 Megatron's are of the parameters' type."""
    layers = []
    for fusion in (True, False):
        layer = build(kind, config_of(kind, gradient_accumulation_fusion=fusion)).bfloat16()
        _give_main_grads(layer, torch.bfloat16)
        layers.append((layer, _accumulate(layer, dtype=torch.bfloat16)))
    assert all(torch.equal(layers[0][1][n], grad) for n, grad in layers[1][1].items())


@pytest.mark.parametrize("kind", ["grouped", "fused"])
def test_placeholders_that_megatron_adds_are_zeros(kind, poison):
    """zero_out_wgrad: a parameter that gets gradients from other places, too."""

    def prepare(layer):
        for p in layer.experts.parameters():
            p.zero_out_wgrad = True

    fused, plain = _both(kind, prepare=prepare)
    _equal(fused, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_without_main_grads_nothing_changes(kind):
    x, dy = batch(config_of(kind), 13)
    grads = []
    for fusion in (True, False):
        layer = build(kind, config_of(kind, gradient_accumulation_fusion=fusion))
        layer.forward_with_aux(x)[0].backward(dy)
        grads.append([p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_frozen_matrices_and_fsdps_are_left_alone():
    layer = build("fused", config_of("fused", gradient_accumulation_fusion=True))
    _give_main_grads(layer)
    w1, v1, w2 = (getattr(layer.experts, name) for name in ("w1", "v1", "w2"))
    before = [p.main_grad.clone() for p in (w1, v1)]
    w1.requires_grad_(False)
    v1.__fsdp_param__ = True
    x, dy = batch(layer.config, 13)
    layer.forward_with_aux(x)[0].backward(dy)
    assert torch.equal(w1.main_grad, before[0]) and w1.grad is None and not w1.grad_added_to_main_grad
    assert not v1.grad_added_to_main_grad and not torch.equal(v1.main_grad, before[1])  # by the hook
    assert w2.grad_added_to_main_grad


def test_a_compiled_layer_leaves_main_grads_to_the_hook():
    layer = build("fused", config_of("fused", gradient_accumulation_fusion=True))
    _give_main_grads(layer)
    x, dy = batch(layer.config, 13)
    torch.compile(lambda x: layer.forward_with_aux(x)[0], backend="aot_eager", fullgraph=True)(x).backward(dy)
    other = build("fused", config_of("fused"))
    _give_main_grads(other)
    other.forward_with_aux(x)[0].backward(dy)
    for name in MATRICES:
        compiled, eager = layer.get_parameter(name), other.get_parameter(name)
        assert not compiled.grad_added_to_main_grad
        assert relative_error(compiled.main_grad, eager.main_grad) < 1e-6


@pytest.mark.parametrize("kind", ["grouped", "fused"])
@pytest.mark.parametrize("compiled", [(True, False, True), (False, True, False)])
def test_N6_main_grad_of_compiled_and_eager_micro_batches_of_a_step(kind, compiled, poison):
    def run_of(layer):
        def run(x):
            return layer.forward_with_aux(x)[0]

        runs = {False: run, True: torch.compile(run, backend="aot_eager", fullgraph=True)}
        following = iter(compiled)
        return lambda x: runs[next(following)](x)

    (_, fused), (_, plain) = _both(kind, run_of)
    for name, grad in plain.items():
        assert relative_error(fused[name], grad) < 1e-6, name
