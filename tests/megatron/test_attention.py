"""Our attention and norms against Megatron's own, values and gradients."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch

from megablocks.testing.launcher import run_distributed_test

SEQ, BATCH, HEADS, DIM = 12, 2, 4, 8


def _attend(config: Any, module_type: Any, mask: Any, mask_type: Any, inputs: Any, seq_q: int) -> list[torch.Tensor]:
    module = module_type(config=config, layer_number=2, attn_mask_type=mask_type, attention_type="self")
    module.train()
    query, key, value = (t.clone().requires_grad_() for t in inputs)
    out = module(query[-seq_q:], key, value, mask, attn_mask_type=mask_type)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out, query.grad, key.grad, value.grad]


def _attentions() -> dict[str, float]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megablocks.megatron.attention import SDPAttention

    harness.initialize(harness.Layout())
    torch.manual_seed(5)
    documents = torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool).tril()
    documents[0, :, 5:, :5] = False  # two documents in the first sequence, as with --reset-attention-mask
    documents[1, :, 9:, :9] = False
    reset = ~documents
    cases = {
        "causal": (4, None, AttnMaskType.causal, SEQ, ()),
        "causal, 2 groups": (2, None, AttnMaskType.causal, SEQ, ()),
        "documents": (4, reset, AttnMaskType.causal, SEQ, ()),
        "documents, 1 group": (1, reset, AttnMaskType.causal, SEQ, ()),
        "no mask": (4, None, AttnMaskType.no_mask, SEQ, ()),
        "arbitrary": (4, reset.flip(3), AttnMaskType.arbitrary, SEQ, ()),
        "one new token": (4, None, AttnMaskType.causal, 1, ()),
        "layer scaling": (4, None, AttnMaskType.causal, SEQ, (("apply_query_key_layer_scaling", True),)),
    }
    out = {}
    for name, (groups, mask, mask_type, seq_q, fields) in cases.items():
        config = harness.transformer_config(harness.Layout(model=(("num_query_groups", groups), *fields)))
        inputs = [torch.randn(SEQ, BATCH, n, DIM) for n in (HEADS, groups, groups)]
        theirs = _attend(config, DotProductAttention, mask, mask_type, inputs, seq_q)
        ours = _attend(config, SDPAttention, mask, mask_type, inputs, seq_q)
        out[name] = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    return out | _alike(reset)


def _alike(reset: torch.Tensor) -> dict[str, float]:
    """Differences between two calls of ours that must be equal. reset: a mask of documents, causal."""
    from megatron.core.transformer.enums import AttnMaskType

    from megablocks.megatron.attention import SDPAttention

    config = harness.transformer_config(harness.Layout(model=(("attention_dropout", 0.25),)))

    def module(mask_type: AttnMaskType = AttnMaskType.causal, **options: Any) -> Any:
        made = SDPAttention(config, 1, mask_type, **options)
        return made.train("attention_dropout" in options)

    q, k, v = (torch.randn(SEQ, BATCH, HEADS, DIM) for _ in range(3))
    whole, padded = module()(q, k, v, None), AttnMaskType.padding_causal
    between = reset & reset.transpose(2, 3)  # hides other documents, not later tokens
    pairs = {
        "three new tokens": (module()(q[-3:], k, v, None), whole[-3:]),
        "padding and causal": (module()(q, k, v, between, attn_mask_type=padded), module()(q, k, v, reset)),
        "type of the call": (
            module()(q, k, v, None, attn_mask_type=AttnMaskType.no_mask), module(AttnMaskType.no_mask)(q, k, v, None)
        ),
        "given scale": (module(softmax_scale=0.5)(q, k, v, None), module()(q * 0.5 * DIM**0.5, k, v, None)),
        "given dropout": (module(attention_dropout=0.0)(q, k, v, None), whole),
    }  # fmt: skip
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def _dropout() -> dict[str, Any]:
    """How many attention weights dropout removes, whether it moves the default generator, and evaluation."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnMaskType

    from megablocks.megatron.attention import SDPAttention

    harness.initialize(harness.Layout())
    config = harness.transformer_config(harness.Layout(model=(("attention_dropout", 0.25),)))
    module = SDPAttention(config=config, layer_number=1, attn_mask_type=AttnMaskType.no_mask, attention_type="self")
    query = torch.zeros(64, 1, HEADS, DIM)
    value = torch.eye(64).view(64, 1, 1, 64).expand(-1, -1, HEADS, -1)  # the output is the attention weights
    before, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"].clone()
    weights = module(query, query, value, None)
    moved = not torch.equal(get_cuda_rng_tracker().get_states()["model-parallel-rng"], tracked)
    untouched = torch.equal(torch.get_rng_state(), before)
    config.sequence_parallel = True  # Megatron's block has taken the tracked generator
    module(query, query, value, None)
    in_block = not torch.equal(torch.get_rng_state(), before)
    module.eval()
    return {
        "dropped": float((weights == 0).float().mean()),
        "kept": float(weights.max()) * 64,
        "default generator untouched": untouched,
        "default generator inside a block": in_block,
        "tracked generator moved": moved,
        "evaluation": float((module(query, query, value, None) * 64 - 1).abs().max()),
    }


def _norms() -> dict[str, float]:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megablocks.megatron.norm import Norm

    harness.initialize(harness.Layout())
    out = {}
    for kind in ("LayerNorm", "RMSNorm"):
        for zero_centered in (False, True):
            fields = (("normalization", kind), ("layernorm_zero_centered_gamma", zero_centered))
            config = harness.transformer_config(harness.Layout(model=fields))
            plain = harness.transformer_config(harness.Layout(model=fields[:1]))
            theirs, ours = WrappedTorchNorm(plain, 32, 0.1), Norm(config, 32, 0.1)
            x = torch.randn(3, 2, 32)
            with torch.no_grad():
                new = [[module(x)] for module in (theirs, ours)]
                for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
                    a.copy_(torch.randn(32))
                    b.copy_(a)
                if zero_centered:
                    ours.weight.sub_(1)
            results = []
            for module, first in zip((theirs, ours), new, strict=True):
                inputs = x.clone().requires_grad_()
                y = module(inputs)
                (y * y.detach().cos()).sum().backward()
                results.append([*first, y, inputs.grad, *(p.grad for p in module.parameters())])
            key = f"{kind}{', zero-centred' if zero_centered else ''}"
            out[key] = max(float((a - b).norm() / b.norm()) for a, b in zip(results[1], results[0], strict=True))
    return out


def _everything() -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
    return _attentions(), _dropout(), _norms()


@pytest.fixture(scope="module")
def measured() -> Any:
    return run_distributed_test(_everything, 1)[0]


def test_attention_equals_megatrons(measured: Any) -> None:
    assert len(measured[0]) == 13
    assert {name: error for name, error in measured[0].items() if not error < 1e-5} == {}


def test_attention_dropout_uses_the_tensor_parallel_generator(measured: Any) -> None:
    seen = measured[1]
    assert seen["dropped"] == pytest.approx(0.25, abs=0.03)
    assert seen["kept"] == pytest.approx(1 / 0.75, rel=1e-5)
    assert seen["default generator untouched"] and seen["tracked generator moved"]
    assert seen["default generator inside a block"]
    assert seen["evaluation"] < 1e-5


def test_norms_equal_torch(measured: Any) -> None:
    assert len(measured[2]) == 4
    assert {name: error for name, error in measured[2].items() if not error < 1e-5} == {}
