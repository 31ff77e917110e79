"""`Arguments`: 0.10's names and defaults, one-line errors, and the losses recorded for 0.10's callers."""

import subprocess
import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megablocks.config import ConfigError
from megablocks.kinds import MLP_IMPLS
from megablocks.layers import Arguments, MoE, dMoE, losses
from megablocks.layers.arguments import from_megatron


@pytest.fixture(autouse=True)
def _nothing_recorded():
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()
    yield
    losses.clear_load_balancing_loss()
    losses.clear_router_zloss()


def _arguments(**changes):
    values = dict(hidden_size=12, ffn_hidden_size=20, moe_num_experts=4, moe_top_k=2, fp16=False, device="cpu")
    return Arguments(**{**values, "moe_zloss_weight": 0.01, **changes})


def test_defaults_are_those_of_0_10():
    expected = dict(
        hidden_size=1024, ffn_hidden_size=4096, num_layers=1, bias=True, return_bias=True, moe_num_experts=1,
        moe_top_k=1, moe_capacity_factor=1, moe_normalize_expert_weights=None, moe_loss_weight=0.1,
        moe_jitter_eps=None, moe_lbl_in_fp32=False, moe_expert_model_parallelism=False, expert_parallel_group=None,
        pipeline_model_parallel_size=1, num_layers_per_virtual_pipeline_stage=None, memory_optimized_mlp=False,
        mlp_type="mlp", mlp_impl="grouped", fp16=True, bf16=False, uniform_expert_assignment=False,
        shared_expert=False, fc_cls=torch.nn.Linear, fc_kwargs={}, remat_act_fn=True, shared_expert_hidden_size=4096,
        shared_expert_weighted_sum=False, moe_zloss_weight=0, moe_zloss_in_fp32=False,
        quantize_inputs_num_bits=-1, quantize_rematerialize_num_bits=-1, quantize_scatter_num_bits=-1,
    )  # fmt: skip
    arguments = Arguments()
    assert {name: getattr(arguments, name) for name in expected} == expected
    assert arguments.dtype == torch.float16
    assert arguments.to_config().activation == "gelu" and arguments.to_config().gelu_approximate == "tanh"
    drawn = torch.empty(200, 200)
    arguments.init_method(drawn)
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    "function, mlp_type, expected",
    [
        (partial(F.gelu, approximate="tanh"), "mlp", ("gelu", "tanh")),
        (F.gelu, "mlp", ("gelu", "none")),
        (torch.nn.GELU(approximate="tanh"), "glu", ("geglu", "tanh")),
        (F.silu, "glu", ("swiglu", "tanh")),
        (torch.nn.SiLU(), "mlp", ("silu", "tanh")),
        (partial(F.relu, inplace=False), "glu", ("reglu", "tanh")),
        ("relu2", "mlp", ("relu2", "tanh")),
        (lambda z: z * torch.sigmoid(z), "glu", ("swiglu", "tanh")),
        (lambda z: F.relu(z) ** 2, "mlp", ("relu2", "tanh")),
        (lambda z: 0.5 * z * (1 + torch.erf(z / 2**0.5)), "mlp", ("gelu", "none")),
        (lambda z: z * torch.sigmoid(1.5957691216057308 * (z + 0.044715 * z**3)), "mlp", ("gelu", "tanh")),
    ],
)
def test_activation_functions_are_recognized(function, mlp_type, expected):
    config = _arguments(activation_fn=function, mlp_type=mlp_type).to_config()
    assert (config.activation, config.gelu_approximate) == expected


class _TrainableSwish(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones(()))

    def forward(self, z):
        return z * torch.sigmoid(self.beta * z)


class _QuickGELU(torch.nn.GELU):
    def forward(self, z):
        return z * torch.sigmoid(1.702 * z)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return F.relu(z)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    "function",
    [F.mish, F.relu6, lambda z: z * torch.sigmoid(1.702 * z), lambda z: F.silu(z.clamp(max=100)), lambda z: z.sum(),
     lambda z: 1.0, lambda z: z.no_method(), _TrainableSwish(), _QuickGELU(),
     _StraightThrough.apply],
)  # fmt: skip
def test_activation_functions_with_other_values_or_slopes_are_refused(function):
    with pytest.raises(ConfigError, match="^activation_fn=.* must be one of gelu, silu, relu, relu2 by name"):
        _arguments(activation_fn=function)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(moe_top_k=5), "moe_top_k=5: must be at most moe_num_experts=4"),
        (dict(moe_num_experts=0), "moe_num_experts=0: must be an integer >= 1"),
        (dict(hidden_size=1.5), "hidden_size=1.5: must be an integer >= 1"),
        (dict(moe_jitter_eps=1.0), "moe_jitter_eps=1.0: must be below 1"),
        (dict(moe_loss_weight=-1.0), "moe_loss_weight=-1.0: must be a finite number >= 0"),
        (dict(mlp_impl="dense"), f"mlp_impl='dense': must be one of {', '.join(MLP_IMPLS)}"),
        (dict(mlp_impl="sparse"), "ffn_hidden_size=20: must be a multiple of 64 with mlp_impl='sparse'"),
        (dict(mlp_type="moe"), "mlp_type='moe': must be one of mlp, glu"),
        (dict(fp16=True, bf16=True), "bf16=True: needs fp16=False"),
        (dict(activation_fn=None), "activation_fn=None: must be one of gelu, silu, relu, relu2 by name"),
        (dict(activation_fn="relu2", mlp_type="glu"), "activation_fn='relu2': with mlp_type='glu' must be one of"),
        (dict(num_layers=6, pipeline_model_parallel_size=4), "pipeline_model_parallel_size=4: must divide num_layers"),
        (dict(num_layers_per_virtual_pipeline_stage=0), "num_layers_per_virtual_pipeline_stage=0: must be an integer"),
        (dict(bias="yes"), "bias='yes': must be True or False"),
        (dict(init_method=3), "init_method=3: must be a function"),
        (dict(fc_cls=None), "fc_cls=None: must be a class"),
        (dict(moe_capacity_factor=-1), "moe_capacity_factor=-1: must be >= 0"),
        (dict(device="gpu"), "device='gpu': must be a device, its name such as 'cpu' or 'cuda:1', the number of a GPU"),
        (dict(device=-1), "device=-1: must be a device"),
        (dict(device=1.5), "device=1.5: must be a device"),
        (dict(moe_weight_parallelism=True), "moe_weight_parallelism=True: must be False: wrap the layer in FSDP"),
        (dict(fc_kwargs=[]), "fc_kwargs=[]: must be a dict"),
        (dict(expert_parallel_group=4), "expert_parallel_group=4: must be a ProcessGroup, or None for all ranks"),
        (
            dict(mlp_impl="fused", memory_optimized_mlp=True, quantize_rematerialize_num_bits=8),
            "quantize_rematerialize_num_bits=8: must be -1 with mlp_impl='fused' and memory_optimized_mlp=True, which",
        ),
    ],
)
def test_bad_values_end_with_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        _arguments(**changes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert "capacity_rule" not in str(error.value), "no field of Arguments"


@pytest.mark.parametrize("given, taken", [(True, 1), (1.0, 1.0), (2, 2), (False, None), (0, None), (None, None)])
def test_normalization_may_be_a_flag(given, taken):
    assert _arguments(moe_normalize_expert_weights=given).to_config().normalize_top_k == taken


def test_weight_parallelism_of_0_5_1_may_be_off():
    """OLMoE and open_lm say so."""
    arguments = _arguments(moe_weight_parallelism=False, weight_parallel_group=None)
    assert dMoE(arguments)(torch.randn(3, 12))[0].shape == (3, 12)


def test_a_field_set_later_is_checked_when_a_layer_is_built():
    arguments = _arguments()
    arguments.moe_top_k = 9
    with pytest.raises(ConfigError, match="moe_top_k=9"):
        dMoE(arguments)


def test_from_megatron_fills_then_checks():
    given = SimpleNamespace(hidden_size=24, ffn_hidden_size=None, moe_top_k=2, moe_num_experts=8, fp16=False, bf16=True)
    arguments = from_megatron(given)
    assert (arguments.hidden_size, arguments.ffn_hidden_size, arguments.moe_top_k) == (24, 4096, 2)
    assert arguments.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="moe_top_k=9"):
        from_megatron(SimpleNamespace(moe_top_k=9))


@pytest.mark.parametrize(
    "fp16, bf16, dtype",
    [(None, {"enabled": True}, torch.bfloat16), ({"enabled": True, "loss_scale": 0}, None, torch.float16),
     ({"enabled": False}, None, None)],
)  # fmt: skip
def test_from_megatron_reads_what_gpt_neox_has(fp16, bf16, dtype):
    """Sections of DeepSpeed's config, and names of init functions, which its program replaces afterwards."""
    inits = dict(init_method="normal", output_layer_init_method="scaled_normal")
    arguments = from_megatron(SimpleNamespace(hidden_size=12, fp16=fp16, bf16=bf16, **inits))
    assert arguments.dtype == dtype and arguments.hidden_size == 12
    assert callable(arguments.init_method) and callable(arguments.output_layer_init_method)


def test_what_arguments_say_is_not_said_twice():
    with pytest.raises(ValueError, match="^seed: must be left out, because Arguments has them"):
        dMoE(_arguments(), seed=3)


def test_a_layer_of_anything_else_is_refused_by_name():
    with pytest.raises(ValueError, match="^args is a dict: must be a MoEConfig or Arguments$"):
        dMoE({"hidden_size": 12})


def test_building_arguments_touches_no_gpu():
    code = (
        "import torch; from megablocks import Arguments; a = Arguments(); a.to_config();"
        "assert not torch.cuda.is_initialized(); print('fine')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "fine\n"


def test_bias_is_returned_or_added():
    arguments = _arguments()
    layer, x = dMoE(arguments), torch.randn(4, 3, 12)
    with torch.no_grad():
        layer.experts.bias.normal_()
    y, bias = layer(x)
    arguments.return_bias = False
    added = dMoE(arguments)
    added.load_state_dict(layer.state_dict())
    assert torch.allclose(added(x), y + bias)
    assert dMoE(_arguments(bias=False))(x).shape == x.shape


@pytest.mark.parametrize("layer_class", [dMoE, MoE])
def test_batched_losses_follow_the_formula_of_0_10(layer_class):
    arguments = _arguments(num_layers=3)
    layers = [layer_class(arguments) for _ in range(3)]
    x = torch.randn(5, 2, 12, requires_grad=True)
    expected, expected_z, summed = 0.0, [], 0.0
    for layer in layers:
        layer(x)
        logits = x.reshape(-1, 12) @ layer.router.layer.weight.t()
        scores = logits.softmax(-1)
        counts = torch.bincount(scores.topk(2, dim=-1).indices.flatten(), minlength=4).float()
        expected += 4 * 0.1 / (3 * 10 * 2) * torch.dot(counts, scores.mean(0))
        expected_z.append(0.01 * torch.logsumexp(logits, 1).square().mean())
    batched = losses.batched_load_balancing_loss(arguments)
    assert torch.allclose(batched, expected) and batched.dtype == torch.float32
    assert torch.allclose(losses.batched_router_zloss(arguments), torch.stack(expected_z))
    (batched + losses.batched_router_zloss(arguments).sum()).backward()
    recorded = [layer.router.layer.weight.grad.clone() for layer in layers]
    config = arguments.to_config().replace(capacity_factor=1.0 if layer_class is MoE else None)
    described = [layer_class(config) for _ in layers]  # the same layers, whose losses come with the output
    for layer, of_arguments in zip(described, layers, strict=True):
        layer.load_state_dict(of_arguments.state_dict())
        summed = summed + sum(layer.forward_with_aux(x)[1].losses.values())
    assert torch.allclose(summed, expected + sum(expected_z))
    summed.backward()
    for layer, grad in zip(described, recorded, strict=True):
        assert torch.allclose(layer.router.layer.weight.grad, grad, atol=1e-7)


def test_recording_only_in_training_and_only_what_has_a_weight():
    layer, x = dMoE(_arguments(moe_zloss_weight=0)), torch.randn(3, 12)
    layer.eval()
    layer(x)
    assert losses.get_load_balancing_loss() == []
    layer.train()
    layer(x)
    ((counts, scores),) = losses.get_load_balancing_loss()
    assert counts.sum() == 6 and torch.allclose(scores.sum(1), torch.ones(3))
    with pytest.warns(UserWarning, match="moe_zloss_weight=0"):
        assert losses.batched_router_zloss(_arguments(moe_zloss_weight=0)) == 0.0
    losses.clear_load_balancing_loss()
    assert losses.get_load_balancing_loss() == []
    assert losses.batched_load_balancing_loss(_arguments(moe_loss_weight=0.0)) == 0.0


def test_a_wrong_number_of_layers_is_refused():
    layer = dMoE(_arguments(num_layers=2))
    layer(torch.randn(3, 12))
    with pytest.raises(ValueError, match=r"recorded: 1, must be 2 with num_layers=2"):
        losses.batched_load_balancing_loss(_arguments(num_layers=2))
    assert losses.batched_load_balancing_loss(_arguments(num_layers=2, pipeline_model_parallel_size=2)) > 0
    assert losses.batched_load_balancing_loss(_arguments(num_layers=4, num_layers_per_virtual_pipeline_stage=1)) > 0
    losses.clear_router_zloss()
    with pytest.raises(ValueError, match=r"router logits recorded: 0"):
        losses.batched_router_zloss(_arguments())


def test_N5_checkpointed_layers_are_recorded_once():
    arguments = _arguments(return_bias=False)
    layer = dMoE(arguments)

    def block(x):  # tanh keeps its output, so that the recomputation runs through the whole layer
        return layer(x).tanh()

    y = checkpoint(block, torch.randn(3, 12, requires_grad=True), use_reentrant=False)
    total = y.sum() + losses.batched_load_balancing_loss(arguments) + losses.batched_router_zloss(arguments).sum()
    total.backward()
    assert len(losses.get_load_balancing_loss()) == 1
    assert losses.batched_router_zloss(arguments).shape == (1,)


def test_the_recorder_is_bounded(monkeypatch):
    recorder = losses.Recorder("things", "clear_things")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(losses.LIMIT + 5):
            recorder.record(n)
    assert recorder.entries() == list(range(5, losses.LIMIT + 5))
    message = "1024 things recorded and never cleared; call clear_things() once a step"
    assert [str(w.message) for w in caught] == [message]


def test_no_tokens_mean_no_loss_but_a_graph():
    arguments = _arguments()
    layer = dMoE(arguments)
    layer(torch.zeros(0, 12))
    total = losses.batched_load_balancing_loss(arguments) + losses.batched_router_zloss(arguments).sum()
    assert total == 0
    total.backward()
    assert (layer.router.layer.weight.grad == 0).all()


@pytest.mark.parametrize("kind", [MoE, dMoE])
@pytest.mark.parametrize(("shape", "said"), [((3, 7), r"\(3, 7\)"), ((), r"\(\)")])
def test_rows_of_another_width_are_refused(kind, shape, said):
    with pytest.raises(ValueError, match=rf"^x: has shape {said}, its last dimension must be hidden_size=12$"):
        kind(_arguments())(torch.zeros(shape))


def test_a_reentrant_checkpoint_around_a_layer_that_returns_its_bias():
    """It took the parameter for an output of its own, so that its backward called itself without end."""
    layer = dMoE(_arguments(return_bias=True))
    inputs = [torch.randn(3, 12, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    for x, wrapped in zip(inputs, (layer, partial(checkpoint, layer, use_reentrant=True)), strict=True):
        y, bias = wrapped(x)
        assert layer.experts.bias.is_leaf
        layer.zero_grad()
        (y + bias).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    assert layer.experts.bias.grad.any()
