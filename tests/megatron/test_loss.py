"""The fused loss inside Megatron trains as Megatron's own does: losses, every gradient, and where it steps aside."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import pytest
import torch
from harness import Layout, Trained

DENSE = (("num_moe_experts", None), ("moe_ffn_hidden_size", None))
PLAIN = Layout(layers=2, model=DENSE)
UNTIED = PLAIN.but(tied=False)
HALF = PLAIN.but(dtype="bfloat16")

REFERENCES = {"plain": PLAIN, "untied": UNTIED, "bf16": HALF}
ALONE = {  # name: (layout of one process, its reference)
    "tied": (PLAIN, "plain"),
    "two sequences a micro-batch": (PLAIN.but(micro_batch=2), "plain"),
    "logits kept": (PLAIN.but(loss_kept_gib=1.0), "plain"),
    "untied alone": (UNTIED, "untied"),
    "bf16 alone": (HALF, "bf16"),
    "full recompute": (PLAIN.but(recompute="full"), "plain"),
}
SPREAD = {  # name: (layout of two processes, its reference)
    "tp2": (PLAIN.but(tp=2), "plain"),
    "tp2 without sequence parallel": (PLAIN.but(tp=2, model=(*DENSE, ("sequence_parallel", False))), "plain"),
    "pp2": (PLAIN.but(pp=2), "plain"),
    "overlapped": (PLAIN.but(distributed_optimizer=True, overlap=True), "plain"),
    "untied overlapped": (UNTIED.but(distributed_optimizer=True, overlap=True), "untied"),
}
Runs = dict[str, list[Trained]]  # by name, then by rank


def _fused(layout: Layout) -> Layout:
    return layout.but(loss_kept_gib=0.0) if layout.loss_kept_gib is None else layout


@pytest.fixture(scope="module")
def alone() -> Runs:
    layouts = [(name, layout, 3) for name, layout in REFERENCES.items()]
    layouts += [(name, _fused(layout), 3) for name, (layout, _) in ALONE.items()]
    return harness.on_ranks(harness.train_all, 1, layouts)


@pytest.fixture(scope="module")
def spread() -> Runs:
    return harness.on_ranks(harness.train_all, 2, [(name, _fused(layout), 3) for name, (layout, _) in SPREAD.items()])


@pytest.mark.parametrize("name", [*ALONE, *SPREAD])
def test_S2_trains_as_with_megatrons_loss(alone: Runs, spread: Runs, name: str) -> None:
    layout, reference = (ALONE | SPREAD)[name]
    runs, plain = (alone if name in ALONE else spread)[name], alone[reference][0]
    tolerance = 2e-2 if layout.dtype == "bfloat16" else 1e-5
    assert runs[0].losses == pytest.approx(plain.losses, rel=max(tolerance / 10, 1e-5))
    assert runs[0].norms == pytest.approx(plain.norms, rel=tolerance)
    grads = harness.assemble([run.grads for run in runs])
    error, worst = harness.worst_difference(grads, harness.assemble([plain.grads]))
    assert error <= tolerance, worst


def _losses(changes: dict[str, Any], replaced: bool) -> Any:
    """A model's losses with the fused loss and without, and what was logged.

    changes: to its config. replaced: whether its output layer has a forward of its own.
    """
    from megablocks.megatron import loss

    harness.initialize(PLAIN)
    config, (model,) = harness.build_model(PLAIN)
    layer = model.module.output_layer
    for name, value in changes.items():
        setattr(config, name, value)
    if replaced:
        layer.forward = type(layer).forward.__get__(layer)
    batch = torch.stack([harness.sample(0), harness.sample(1)])
    inputs = batch[:, :-1].contiguous(), torch.arange(harness.SEQ).expand(2, -1), None
    lines: list[str] = []
    logger = logging.getLogger(loss.__name__)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    loss._log.cache_clear()
    calls: list[Any] = []  # overlapped data parallelism waits in such a hook until the weight is there
    layer.register_forward_pre_hook(lambda *call: calls.append(call))
    fused = loss.loss_arguments(1.0)
    op = mock.patch.object(loss, "linear_cross_entropy", wraps=loss.linear_cross_entropy)
    with torch.no_grad(), op as called:
        labels = batch[:, 1:].contiguous()
        first = model(*inputs, labels=labels, **fused)
        second = model(*inputs, labels=labels, **fused)
        plain = model(*inputs, labels=labels)
        logits = model(*inputs, **fused)
    assert torch.equal(first, second) and logits.shape == (2, harness.SEQ, harness.VOCAB)
    assert "forward" in vars(layer) or not replaced
    assert all(call.kwargs["keep_bytes"] == 2**30 for call in called.call_args_list)
    assert len(calls) == 4
    logger.removeHandler(handler)
    return {"it": (first, plain, lines)}


@pytest.mark.parametrize(
    ("changes", "replaced", "line"),
    [
        ({}, False, None),
        ({"cross_entropy_loss_fusion": True}, False, "cross_entropy_loss_fusion=True"),
        ({"use_mup": True, "mup_output_mult": 0.5}, False, "use_mup=True: it scales the logits"),
        ({}, True, "the output layer ColumnParallelLinear"),
    ],
)
def test_L2_megatrons_loss_runs_where_the_fused_one_cannot_and_one_line_says_so(
    changes: dict[str, Any], replaced: bool, line: str | None
) -> None:
    fused, plain, lines = harness.on_ranks(_losses, 1, changes, replaced)["it"][0]
    if line is None:
        assert lines == []
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
    else:
        (only,) = lines
        assert only.startswith("fused loss: off") and line in only
        assert torch.equal(fused, plain)


LOGITS = {"mtp_num_layers": 1, "defer_embedding_wgrad_compute": True, "config_logger_dir": "d"}


def _obstacles() -> dict[str, dict[str, str | None]]:
    """What the fused loss says about an output layer and a config with one change."""
    from megablocks.megatron.loss import _obstacle

    harness.initialize(UNTIED)
    config, (model,) = harness.build_model(UNTIED)
    layer = model.module.output_layer
    split = torch.nn.Parameter(torch.empty(()))
    split.__fsdp_param__ = True  # type: ignore[attr-defined]
    two = SimpleNamespace(size=lambda: 2)

    def named(weight: torch.Tensor | None = None, gather: bool | None = None, **changes: Any) -> str | None:
        with contextlib.ExitStack() as stack:
            for name, value in changes.items():
                stack.enter_context(mock.patch.object(layer if hasattr(layer, name) else config, name, value))
            return _obstacle(layer, weight, gather, config)

    return {
        "it": {
            "nothing": named(gather=True),
            "gathered": named(gather_output=True, tp_group=two),
            "gathered at this call": named(gather=True, tp_group=two),
            "not gathered": named(gather=False, gather_output=True, tp_group=two),
            "bias": named(bias=torch.nn.Parameter(torch.ones(harness.VOCAB))),
            "remat": named(gtp_remat_size=2),
            "split": named(weight=split),
            **{name: named(**{name: value}) for name, value in LOGITS.items()},
        }
    }


def test_what_the_fused_loss_would_compute_otherwise_is_an_obstacle() -> None:
    (found,) = harness.on_ranks(_obstacles, 1)["it"]
    assert {name for name, why in found.items() if why is None} == {"nothing", "not gathered"}
    assert found["gathered"] == found["gathered at this call"] and "parallel_output=False" in found["gathered"]
    assert found["remat"] == found["split"] and "split over data-parallel ranks" in found["split"]
    assert found["bias"] == "the bias of the output layer"
    assert all(found[name].startswith(f"{name}={value!r}: ") for name, value in LOGITS.items())


def test_a_tenth_of_the_gpus_memory_keeps_logits_unless_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from megablocks.megatron.loss import loss_arguments

    assert loss_arguments(None)["output_processor_context"] == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=80 * 2**30))
    assert [loss_arguments(given)["output_processor_context"] for given in (None, 0.5)] == [8, 0.5]
