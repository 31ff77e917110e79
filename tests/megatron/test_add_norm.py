"""Additions computed together with the next norm, in a whole model on a CPU, against Megatron's own functions."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from harness import Layout

from megablocks.testing.launcher import run_distributed_test

FUSION = ("bias_dropout_fusion", True)
DENSE = ("num_moe_experts", None), ("moe_ffn_hidden_size", None), ("moe_aux_loss_coeff", 0.0)
BIASED = Layout(layers=3, model=(FUSION, *DENSE, ("add_bias_linear", True)))
RMS = Layout(layers=3, model=(FUSION, ("normalization", "RMSNorm"), ("moe_layer_freq", [0, 1, 1])))
CASES: dict[str, tuple[Layout, int]] = {  # and how many additions of a forward pass are computed with a norm
    "layer norm, biases": (BIASED, 6),
    "rms norm, experts": (RMS, 6),
    "bf16": (RMS.but(dtype="bfloat16"), 6),
    "fusion off": (BIASED.but(model=BIASED.model[1:]), 0),
    "torch's norms": (BIASED.but(settings=(("norm", "torch"),)), 0),
    "two stages": (RMS.but(layers=4, pp=2, model=RMS.model[:2]), 3),  # the first stage; the last has 4
    "overlapped gather": (RMS.but(distributed_optimizer=True, overlap=True), 6),
    "every layer recomputed": (RMS.but(recompute="full"), 0),
    "attention recomputed": (BIASED.but(recompute="core_attn"), 6),
}


AROUND = [(around, reentrant) for around in ("none", "addition", "norm", "both") for reentrant in (True, False)]


@contextlib.contextmanager
def _on_cpu() -> Iterator[tuple[mock.Mock, mock.Mock]]:
    """Our ops compute the norms on a CPU too. Yields mocks that count additions, and norms without one."""
    from megablocks.megatron import add_norm, norm

    add_norm.install()
    with (
        mock.patch.object(norm.Norm, "is_fused", lambda self, x: self.fused),
        mock.patch.object(norm, "add_norm", wraps=norm.add_norm) as additions,
        mock.patch.object(norm, "norm", wraps=norm.norm) as alone,
    ):
        yield additions, alone


def _train(layout: Layout) -> tuple[Any, Any, int, int]:
    """Two steps without and with our ops, and how many additions and norms without one ours computed."""
    theirs = harness.train(layout, 2, weights=True)
    with _on_cpu() as (additions, alone):
        ours = harness.train(layout, 2, weights=True)
    return theirs, ours, additions.call_count, alone.call_count


def _train_all(world: int) -> dict[str, tuple[Any, Any, int, int]]:
    return {name: _train(layout) for name, (layout, _) in CASES.items() if layout.pp == world}


@pytest.fixture(scope="module")
def trained() -> dict[str, list[tuple[Any, Any, int, int]]]:
    out: dict[str, list[tuple[Any, Any, int, int]]] = {}
    for world in (1, 2):
        for rank in run_distributed_test(_train_all, world, world):
            for name, found in rank.items():
                out.setdefault(name, []).append(found)
    return out


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_megatrons(trained: dict[str, list[tuple[Any, Any, int, int]]], case: str) -> None:
    layout, additions = CASES[case]
    theirs, ours = ([run[i].weights for run in trained[case]] for i in (0, 1))
    error, where = harness.worst_difference(*(harness.assemble(weights, 1e-4) for weights in (theirs, ours)))
    limit = 0.02 if layout.dtype == "bfloat16" else 1e-5
    assert error < limit, where
    for rank, (before, after, calls, alone) in enumerate(trained[case]):
        assert after.losses == pytest.approx(before.losses, rel=limit)
        micro_batches = 2 * harness.GLOBAL_BATCH
        assert calls == micro_batches * (additions + (rank if layout.pp > 1 else 0))
        assert not additions or alone == micro_batches, "the first norm of a stage follows no addition"


def _build() -> int:
    """The layers of this stage, of a model with one layer, which the last stage has."""
    from megablocks.megatron import add_norm

    layout = Layout(layers=1, pp=2, tied=False, model=(FUSION, ("account_for_embedding_in_pipeline_split", True)))
    harness.initialize(layout)
    add_norm.install()
    _, (chunk,) = harness.build_model(layout)
    return len(chunk.module.decoder.layers)


def test_a_stage_may_have_no_layer() -> None:
    assert run_distributed_test(_build, 2) == [0, 1]


def _write(_: Any, __: Any, result: tuple[torch.Tensor, Any]) -> None:
    result[0].mul_(1.5)


def _evaluate(out: dict[str, Any]) -> None:
    """Adds the losses of a model in evaluation, by Megatron's and by our functions, and what ours left behind."""
    harness.initialize(RMS)
    with _on_cpu():
        _, (model,) = harness.build_model(RMS)
    model.eval()
    tokens = torch.stack([harness.sample(i) for i in range(2)])
    given = tokens[:, :-1].contiguous(), torch.arange(harness.SEQ).expand(2, -1), None
    with torch.no_grad():
        out["Megatron's"] = model(*given, labels=tokens[:, 1:].contiguous())
    graphs: list[Any] = []
    for layer in model.module.decoder.layers:
        layer.register_forward_hook(lambda _, __, result: graphs.append(result[0].grad_fn and str(result[0].grad_fn)))
    for mode in (torch.no_grad, torch.inference_mode):
        graphs.clear()
        with _on_cpu() as (additions, alone), mode():
            loss = model(*given, labels=tokens[:, 1:].contiguous())
        out[mode.__name__] = loss.clone(), additions.call_count, alone.call_count, graphs[:]
    for layer in model.module.decoder.layers:
        layer.register_forward_hook(_write)
    with torch.no_grad():
        written = model(*given, labels=tokens[:, 1:].contiguous())
        with _on_cpu():
            out["written"] = written, model(*given, labels=tokens[:, 1:].contiguous())


def _first_bad(layer: int) -> Any:
    """What the sentinels say if a weight of a layer's MLP is infinite."""
    from megablocks.monitor.guards import LayerSentinels

    with _on_cpu():
        _, (model,) = harness.build_model(BIASED)
        layers = model.module.decoder.layers
        sentinels = LayerSentinels(layers, [str(i) for i in range(3)], "cpu")
        layers[layer].mlp.linear_fc2.weight.data[5, 7] = torch.inf
        tokens = torch.stack([harness.sample(i) for i in range(2)])
        model(tokens[:, :-1].contiguous(), torch.arange(harness.SEQ).expand(2, -1), None).sum().backward()
    sentinels.end_step(torch.tensor(False))
    return sentinels.first_bad()


def _alone(addition: Any, norm: Any, x: torch.Tensor, residual: torch.Tensor) -> dict[str, Any]:
    """Where Megatron's function adds: by the reason, whether the sum has a norm."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from megablocks.megatron.norm import Norm
    from megablocks.moe.main_grad import is_split

    def joined(x: torch.Tensor = x, prob: float = 0.0) -> bool:
        return hasattr(addition(True, True)((x, None), residual, prob), "normalized")

    class Other(Norm):
        def forward(self, x: Any) -> torch.Tensor:
            return super().forward(x)

    out = {"joined": joined(), "p = 1": joined(prob=1.0), "another dtype": joined(x.double())}
    hook = norm.register_forward_hook(lambda *_: None)
    out["a hook on the norm"] = joined()
    hook.remove()
    with mock.patch.object(norm, "is_fused", lambda _: False):
        out["no kernel"] = joined()
    norm.__class__ = Other
    out["another forward"] = joined()
    norm.__class__ = Norm
    norm.weight.__fsdp_param__ = True
    out["split"] = joined()
    del norm.weight.__fsdp_param__
    out["gathered after a split"] = joined()
    mesh = init_device_mesh("cpu", (1,))
    assert is_split(distribute_tensor(torch.ones(3), mesh, [Replicate()])) and not is_split(torch.ones(3))
    return {"alone": out}


def _checkpointed() -> dict[str, Any]:
    """Gradients through an addition and its norm, with a checkpoint around none, the addition, the norm, or both."""
    from torch.utils.checkpoint import checkpoint

    from megablocks.megatron.add_norm import AddNorm
    from megablocks.megatron.norm import Norm

    harness.initialize(Layout())
    config = harness.transformer_config(BIASED)
    addition, norm = AddNorm(), Norm(config, 32)
    addition.norm = norm
    torch.nn.init.normal_(norm.weight)
    x, residual, bias = torch.randn(5, 2, 32), torch.randn(5, 2, 32), torch.randn(32)

    def add(x: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return addition(True, True)((x, bias), residual, 0.0)

    def both(*terms: torch.Tensor) -> torch.Tensor:
        total = add(*terms)
        return total * norm(total)

    def run(around: str, reentrant: bool, *terms: torch.Tensor) -> torch.Tensor:
        if around == "both":
            return checkpoint(both, *terms, use_reentrant=reentrant)
        total = checkpoint(add, *terms, use_reentrant=reentrant) if around == "addition" else add(*terms)

        def then(total: torch.Tensor) -> torch.Tensor:
            return total * norm(total)

        return checkpoint(then, total, use_reentrant=reentrant) if around == "norm" else then(total)

    out: dict[str, Any] = {}
    with _on_cpu():
        for around, reentrant in AROUND:
            terms = [t.clone().requires_grad_() for t in (x, residual, bias)]
            norm.zero_grad()
            result = run(around, reentrant, *terms)
            (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
            out[f"{around} {reentrant}"] = [result.detach(), *(t.grad for t in (*terms, *norm.parameters()))]
        kept = weakref.ref(add(*terms).normalized.y)  # type: ignore[attr-defined]
        out["kept"] = kept() is not None
        torch.manual_seed(5)
        total = addition(True, True)((x, bias), residual, 0.25)
        out["dropped"] = float((total == residual).float().mean()), total
        torch.manual_seed(5)
        out["again"] = addition(True, True)((x, bias), residual, 0.25)
        out["evaluated"] = addition(False, True)((x, bias), residual, 0.25)
        out["sum"] = x + bias + residual
        other = Norm(config, 32)
        out["another norm"] = other(add(x, residual, bias)), other(out["sum"])
        out |= _alone(addition, norm, x, residual)  # last, because a norm that was split stays alone
        kept = total != residual
        out["scaled"] = torch.where(kept, (x + bias) / 0.75 + residual, residual)
    _evaluate(out)
    out["bad"] = [_first_bad(layer) for layer in range(3)]
    from megablocks.megatron.add_norm import _fits

    changes: tuple[dict[str, Any], ...] = (
        {}, {"recompute_granularity": "full"}, {"recompute_modules": ["layernorm"]}, {"cpu_offloading": True},
        {"fine_grained_activation_offloading": True}, {"overlap_moe_expert_parallel_comm": True},
    )  # fmt: skip
    for changed in changes:
        other_config = copy.copy(config)
        vars(other_config).update(changed)
        out.setdefault("fits", {})[str(changed)] = _fits(other_config)
    return out


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_distributed_test(_checkpointed, 1)[0]


@pytest.mark.parametrize(("mode", "joined"), [("no_grad", 6), ("inference_mode", 0)])
def test_evaluation_makes_no_graph_and_computes_each_norm_once(found: dict[str, Any], mode: str, joined: int) -> None:
    loss, additions, norms_alone, graphs = found[mode]
    torch.testing.assert_close(loss, found["Megatron's"])
    assert (additions, norms_alone) == (joined, 7 - joined)
    assert graphs == [None] * 3


def test_a_hook_may_write_to_a_layers_output_in_evaluation(found: dict[str, Any]) -> None:
    torch.testing.assert_close(*found["written"])
    assert not torch.allclose(found["written"][0], found["Megatron's"])


def test_checkpoints_and_dropout(found: dict[str, Any]) -> None:
    for around, reentrant in AROUND:
        for got, expected in zip(found[f"{around} {reentrant}"], found["none True"], strict=True):
            torch.testing.assert_close(got, expected)
    assert not found["kept"], "the sum and its norm hold each other"
    torch.testing.assert_close(*found["another norm"])


def test_N3_sentinels_name_the_layer_whose_sum_is_bad(found: dict[str, Any]) -> None:
    assert found["bad"] == [("forward", f"the output of {layer}") for layer in range(3)]


def test_megatrons_function_adds_where_ours_does_not_fit(found: dict[str, Any]) -> None:
    assert [reason for reason, joined in found["alone"].items() if joined] == ["joined"]
    assert len(found["fits"]) == 6 and [changed for changed, fits in found["fits"].items() if fits] == ["{}"]
    share, total = found["dropped"]
    assert 0.15 < share < 0.35
    torch.testing.assert_close(total, found["scaled"])
    assert torch.equal(total, found["again"])
    torch.testing.assert_close(found["evaluated"], found["sum"])
