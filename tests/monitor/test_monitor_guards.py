"""The loss window and the sentinels, on cases with a known answer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megablocks.monitor.guards import LayerSentinels, LossWindow, first_bad_parameter, is_bad
from megablocks.ops.add_norm import add_norm


def test_F4_window_detects_a_spike_and_ignores_nan() -> None:
    window = LossWindow(size=8, factor=3.0)
    for loss in (5.0, 4.0, 4.5, 4.2):
        assert not window.is_spike(loss)
    for bad in (math.nan, math.inf, -math.inf):
        assert not window.is_spike(bad) or bad == math.inf
    assert window.median() == pytest.approx(4.35)
    assert window.is_spike(13.1) and not window.is_spike(13.0)


def test_F4_a_loss_that_stays_high_is_accepted() -> None:
    window = LossWindow(size=8, factor=2.0)
    for _ in range(8):
        window.is_spike(1.0)
    skipped = [window.is_spike(10.0) for _ in range(8)]
    assert skipped[0] and not skipped[-1]
    assert sum(skipped) <= 5


def test_F4_too_few_losses_or_factor_zero_give_no_spike() -> None:
    window = LossWindow(size=64, factor=2.0)
    assert not any(window.is_spike(loss) for loss in (1.0, 100.0) * 8)
    off = LossWindow(size=4, factor=0.0)
    assert not any(off.is_spike(loss) for loss in (1.0, 1.0, 1.0, 1.0, 1e9))


def test_F4_window_state_survives_json_and_drops_nan() -> None:
    import json

    window = LossWindow(size=8, factor=2.0)
    for loss in (3.0, 1.0, 2.0, 5.0):
        window.is_spike(loss)
    copy = LossWindow(size=8, factor=2.0)
    copy.load_state_dict(json.loads(json.dumps(window.state_dict())))
    assert copy.median() == window.median() == 2.5
    copy.load_state_dict({"losses": [6.0, math.nan, 4.0, 5.0, 8.0]})
    assert copy.median() == 5.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_is_bad_finds_one_value_anywhere(dtype: torch.dtype, value: float) -> None:
    x = torch.randn(7, 13, dtype=dtype)
    assert not is_bad(x)
    x[6, 12] = value
    assert is_bad(x) and is_bad(x.t())
    assert not is_bad(torch.empty(0, dtype=dtype))
    assert not is_bad(torch.full((4,), torch.finfo(dtype).max, dtype=dtype))


KINDS = ("", "LayerNorm", "RMSNorm")


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.hurt, self.normalized = "", ""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = self.linear(x)
        if self.hurt.startswith("forward"):
            bad = float(self.hurt.split()[1])
            out = out + torch.tensor([[0.0, bad, 0.0, 0.0], *[[0.0] * 4] * 4])
        if self.hurt == "backward":
            out.register_hook(lambda grad: grad * math.inf)
            out = out.clone()
        if self.normalized:
            factor, weight = (1e-20, 1e10) if self.hurt == "norm" else (1.0, 1.0)
            bias = torch.zeros(4) if self.normalized == "LayerNorm" else None
            out, y, scale = add_norm(factor * out, torch.zeros_like(out), torch.full((4,), weight), bias, eps=2e-38)
            out.normalized = SimpleNamespace(y=y, scale=scale)
        return out, None


def _run(hurt: int | None, how: str = "", normalized: str = "") -> LayerSentinels:
    """A step of three layers. normalized: a kind of norm. Outputs then have its result, which the next layer reads."""
    layers = [_Layer() for _ in range(3)]
    sentinels = LayerSentinels(layers, ["layer 1", "layer 2", "layer 3"], "cpu")
    if hurt is not None:
        layers[hurt].hurt = how
    x = torch.randn(5, 4)
    for layer in layers:
        layer.normalized = normalized
        x, _ = layer(x)
        x = x.normalized.y if normalized else x
    (x.square() if how != "norm" else 1e10 * x).sum().backward()
    sentinels.end_step(torch.tensor(False))
    return sentinels


@pytest.mark.parametrize("normalized", KINDS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_N3_sentinels_name_the_layer_of_a_bad_value_in_forward(layer: int, value: str, normalized: str) -> None:
    found = _run(layer, f"forward {value}", normalized).first_bad()
    assert found == ("forward", f"the output of layer {layer + 1}")


@pytest.mark.parametrize("normalized", KINDS)
@pytest.mark.parametrize("layer", [1, 2])
def test_N3_sentinels_name_the_layer_of_a_backward_inf(layer: int, normalized: str) -> None:
    # The backward of layer `layer` computes a bad gradient, which is the gradient of the previous layer's output.
    sentinels = _run(layer, "backward", normalized)
    assert sentinels.first_bad() == ("backward", f"the backward of layer {layer + 1}")
    sentinels.end_step(torch.tensor(True))  # the steps after a bad one change nothing
    assert sentinels.first_bad() == ("backward", f"the backward of layer {layer + 1}")
    sentinels.end_step(torch.tensor(False))
    assert sentinels.first_bad() == (None, None)


def test_N3_sentinels_name_a_norm_that_was_computed_with_its_sum() -> None:
    """The gradient that arrives is finite. What the norm makes of it is not."""
    assert _run(2, "norm", "RMSNorm").first_bad() == ("backward", "the backward of the output layer")


def test_N3_sentinels_report_nothing_on_a_good_step_or_in_evaluation() -> None:
    assert _run(None).first_bad() == _run(None, normalized="RMSNorm").first_bad() == (None, None)
    layer = _Layer()
    sentinels = LayerSentinels([layer], ["layer 1"], "cpu")
    layer.hurt = "forward nan"
    layer.eval()
    layer(torch.randn(5, 4))
    sentinels.end_step(torch.tensor(False))
    assert sentinels.first_bad() == (None, None)


def test_N3_first_bad_parameter_in_order() -> None:
    good, bad = torch.ones(3), torch.tensor([1.0, math.nan])
    assert first_bad_parameter([("a", good), ("b", None), ("c", bad), ("d", bad)]) == "c"
    assert first_bad_parameter([("a", good)]) is None
