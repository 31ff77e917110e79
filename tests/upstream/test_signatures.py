"""The surface of megablocks 0.10: every name is where it was and takes the arguments that it took."""

import importlib
import inspect
import operator
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import megablocks
import megablocks.ops

REQUIRED = inspect.Parameter.empty

# module.name → 0.10's parameters, with defaults where they have one. For a class those of its constructor.
FUNCTIONS = {
    "ops.binned_gather": "x indices bins bin_size top_k",
    "ops.binned_scatter": "x indices weights bins top_k",
    "ops.exclusive_cumsum": "x dim",
    "ops.inclusive_cumsum": "x dim",
    "ops.gather": "x indices bin_ids bins top_k",
    "ops.histogram": "x max_val",
    "ops.padded_gather": "x indices bin_ids bins padded_bins top_k",
    "ops.padded_scatter": "x indices bin_ids weights bins padded_bins top_k",
    "ops.repeat": "x tiling",
    "ops.replicate": "x bins num_outputs",
    "ops.round_up": "x value",
    "ops.scatter": "x indices bin_ids weights bins top_k",
    "ops.sort": "x end_bit=None",
    "ops.sum": "x dim=0",
    "ops.topology": "padded_bins block_size output_block_rows output_block_columns",
    "layers.activation_fn.act_fn": "x function return_grad_fn=False **kwargs",
    "layers.all_to_all.all_to_all": "x output_split_sizes input_split_sizes group async_op=False",
    "layers.arguments.from_megatron": "megatron_args",
    "layers.common.cast_if_autocast_enabled": "tensor",
    "layers.common.dtype": "args",
    "layers.dmlp_registry.get": "args",
    "layers.dmoe.ParallelDroplessMLP": "args",
    "layers.gelu.gelu": "x",
    "layers.gelu.gelu_backward_": "grad x",
    "layers.glu.GroupedGLU": "args",
    "layers.glu.SharedGLU": "args",
    "layers.glu.SparseGLU": "args",
    "layers.mlp.GroupedMLP": "args",
    "layers.mlp.MLP": "args",
    "layers.mlp.SharedMLP": "args",
    "layers.mlp.SparseMLP": "args",
    "layers.moe.ParallelMLP": "args",
    "layers.moe.batched_load_balancing_loss": "args",
    "layers.moe.clear_load_balancing_loss": "",
    "layers.moe.get_load_balancing_loss": "",
    "layers.moe.save_load_balancing_loss": "loss",
    "layers.mpu.copy_expert_model_parallel_attributes": "destination_tensor source_tensor",
    "layers.mpu.expert_sharding_degree": "args",
    "layers.mpu.experts_per_rank": "args",
    "layers.mpu.features_per_rank": "args",
    "layers.mpu.get_expert_parallel_rank": "args",
    "layers.mpu.get_expert_parallel_world_size": "args",
    "layers.mpu.hidden_sharding_degree": "args",
    "layers.mpu.is_moe_param": "tensor",
    "layers.mpu.param_is_expert_model_parallel": "param",
    "layers.mpu.set_expert_model_parallel_attributes": "tensor is_parallel",
    "layers.mpu.synchronized_print": "group *x",
    "layers.router.LearnedRouter": "args",
    "layers.router.batched_router_zloss": "args",
    "layers.router.clear_router_zloss": "",
    "layers.sharedexpert_registry.get": "args",
    "layers.glu.memory_optimized_grouped_glu": "x w1 v1 w2 batch_sizes activation_fn",
    "layers.mlp.memory_optimized_grouped_mlp": "x w1 w2 batch_sizes activation_fn",
    "layers.mlp.memory_optimized_mlp": "x w1 w2 topo activation_fn",
    "layers.mlp.create_dmoe_expert_weights": "args num_experts rows columns init_method",
    "layers.mlp.create_moe_expert_weights": "args num_experts ffn_hidden_size hidden_size init_method",
    "layers.mlp.resolve_dtensor": "weight",
    "layers.mlp.scale_gradient": "x scale",
    "backend.kernels.binned_gather": "x indices weights bins expert_capacity top_k",
    "backend.kernels.binned_scatter": "x indices weights bins top_k",
    "backend.kernels.binned_scatter_wgrad": "x grad indices bins top_k",
    "backend.kernels.gather": "x indices bin_ids weights bins top_k",
    "backend.kernels.padded_gather": "x indices bin_ids weights bins padded_bins top_k",
    "backend.kernels.padded_scatter": "x indices bin_ids weights bins padded_bins top_k",
    "backend.kernels.padded_scatter_wgrad": "x grad indices bin_ids bins padded_bins top_k",
    "backend.kernels.scatter": "x indices bin_ids weights bins top_k",
    "backend.kernels.scatter_wgrad": "x grad indices bin_ids bins top_k",
    "grouped_gemm_util.grouped_gemm_is_available": "",
    "grouped_gemm_util.assert_grouped_gemm_is_available": "",
}

_SORTED = "x tokens_per_expert indices bin_ids expert_weights bins"
METHODS = {
    "grouped_gemm_util.backend.gmm": "a b batch_sizes trans_a=False trans_b=False c=None",
    "grouped_gemm_util.ops.gmm": "a b batch_sizes trans_b=False",
    "layers.all_to_all.AllToAllOp.apply": "x output_split_sizes input_split_sizes group async_op=False",
    "layers.dmoe.ParallelDroplessMLP.forward": "x scores expert_weights top_experts",
    "layers.dmoe.ParallelDroplessMLP.forward_once": "x expert_weights top_experts",
    "layers.dmoe.ParallelDroplessMLP.grouped_forward_once": "x expert_weights top_experts",
    "layers.dmoe.ParallelDroplessMLP.grouped_permute_and_compute": f"{_SORTED} expert_capactiy top_k",
    "layers.dmoe.ParallelDroplessMLP.permute_and_compute": f"{_SORTED} expert_capactiy top_k",
    "layers.dmoe.ParallelDroplessMLP.sparse_forward_once": "x expert_weights top_experts",
    "layers.dmoe.ParallelDroplessMLP.sparse_permute_and_compute": f"{_SORTED} expert_capactiy top_k",
    "layers.dmoe.dMoE.__init__": "args",
    "layers.dmoe.dMoE.forward": "x",
    "layers.glu.GroupedGLU.forward": "x tokens_per_expert",
    "layers.glu.GroupedGLU.scale_grad": "w",
    "layers.glu.MemoryOptimizedGroupedGLU.apply": "x w1 v1 w2 batch_sizes activation_fn",
    "layers.glu.SharedGLU.forward": "x",
    "layers.glu.SparseGLU.forward": "x topo",
    "layers.glu.SparseGLU.scale_grad": "w",
    "layers.mlp.GroupedMLP.forward": "x tokens_per_expert",
    "layers.mlp.GroupedMLP.scale_grad": "w",
    "layers.mlp.MLP.forward": "x",
    "layers.mlp.MLP.scale_grad": "w",
    "layers.mlp.MemoryOptimizedGroupedMLP.apply": "x w1 w2 batch_sizes activation_fn",
    "layers.mlp.MemoryOptimizedMLP.apply": "x w1 w2 topo activation_fn",
    "layers.mlp.SharedMLP.add_experts_sharedexpert": "shared_expert_out expert_out",
    "layers.mlp.SharedMLP.forward": "x",
    "layers.mlp.SparseMLP.forward": "x topo",
    "layers.mlp.SparseMLP.scale_grad": "w",
    "layers.moe.MoE.__init__": "args",
    "layers.moe.MoE.forward": "x",
    "layers.moe.ParallelMLP.expert_capacity": "tokens",
    "layers.moe.ParallelMLP.forward": "x scores expert_weights top_experts",
    "layers.moe.ParallelMLP.forward_once": "x expert_weights top_experts",
    "layers.moe.ParallelMLP.indices_and_bins": "top_expert",
    "layers.moe.ParallelMLP.parallel_forward_once": "x expert_weights top_experts",
    "layers.moe.ParallelMLP.permute_and_compute": f"{_SORTED} expert_capacity top_k",
    "layers.router.LearnedRouter.forward": "x",
    "layers.router.LearnedRouter.jitter": "x",
}

# Names that are no functions.
VALUES = (
    "_version.__version__ layers.arguments.Arguments layers.arguments.DEFAULT_ACTIVATION_FN layers.arguments.InitFn "
    "layers.dmlp_registry.MlpType layers.mpu.MoeParam "
    "layers.moe.common layers.moe.mlp layers.moe.router layers.dmoe.common layers.dmoe.moe layers.dmoe.mpu"
).split()

# The class of an autograd function → the function that its `apply` is.
OPERATORS = {
    "ops.binned_gather.BinnedGatherOp": "ops.binned_gather",
    "ops.binned_scatter.BinnedScatterOp": "ops.binned_scatter",
    "ops.cumsum.ExclusiveCumsumOp": "ops.exclusive_cumsum",
    "ops.cumsum.InclusiveCumsumOp": "ops.inclusive_cumsum",
    "ops.gather.GatherOp": "ops.gather",
    "ops.histogram.HistogramOp": "ops.histogram",
    "ops.padded_gather.PaddedGatherOp": "ops.padded_gather",
    "ops.padded_scatter.PaddedScatterOp": "ops.padded_scatter",
    "ops.replicate.ReplicateOp": "ops.replicate",
    "ops.scatter.ScatterOp": "ops.scatter",
    "ops.sort.SortOp": "ops.sort",
    "ops.topology.TopologyOp": "ops.topology",
    "layers.all_to_all.AllToAllOp": "layers.all_to_all.all_to_all",
    "layers.glu.MemoryOptimizedGroupedGLU": "layers.glu.memory_optimized_grouped_glu",
    "layers.mlp.MemoryOptimizedGroupedMLP": "layers.mlp.memory_optimized_grouped_mlp",
    "layers.mlp.MemoryOptimizedMLP": "layers.mlp.memory_optimized_mlp",
    "layers.mlp.ScaleGradient": "layers.mlp.scale_gradient",
}

# ScatterMoE's, as attributes of megablocks.layers.scattermoe.
SCATTERMOE = {
    "flatten_sort_count": "expert_idxs num_experts",
    "kernels.ops.group": "A sorted_expert_idxs coeff=None fan_out=1 out=None",
    "kernels.ops.group_bwd_W": "DY X expert_offsets E has_bias=False",
    "kernels.ops.scatter2scatter": (
        "X W sorted_expert_idxs sorted_scattered_idxs k b=None x_grouped=False y_grouped=False out=None"
    ),
    "mlp.GLUMLP": "input_size hidden_size num_experts top_k bias=False activation=SiLU()",
    "mlp.GLUMLP.forward": "x expert_p expert_idxs",
    "mlp.MLP": "input_size hidden_size num_experts top_k bias=False activation=None",
    "mlp.MLP.forward": "x expert_p expert_idxs",
    "parallel_experts.ParallelExperts": "num_experts input_size output_size bias=False",
    "parallel_experts.ParallelExperts.forward": (
        "inputs k sorted_expert_idxs sorted_scattered_idxs expert_offsets gates=None grouped_in=False grouped_out=False"
    ),
    "parallel_experts.ParallelExperts.reset_parameters": "",
    "parallel_experts.ParallelLinear.apply": (
        "inputs expert_weights k sorted_expert_idxs sorted_scattered_idxs expert_offsets expert_biases=None gates=None "
        "grouped_in=False grouped_out=False"
    ),
    "parallel_linear": (
        "inputs expert_weights k sorted_expert_idxs sorted_scattered_idxs expert_offsets expert_biases=None gates=None "
        "grouped_in=False grouped_out=False"
    ),
}

# The fields of Arguments with 0.10's defaults; a field without one here has an object that `repr` does not show well.
ARGUMENTS = (
    "hidden_size=1024 ffn_hidden_size=4096 num_layers=1 bias=True return_bias=True activation_fn moe_num_experts=1 "
    "moe_top_k=1 moe_capacity_factor=1 moe_normalize_expert_weights=None moe_loss_weight=0.1 moe_jitter_eps=None "
    "moe_lbl_in_fp32=False moe_expert_model_parallelism=False expert_parallel_group=None "
    "pipeline_model_parallel_size=1 num_layers_per_virtual_pipeline_stage=None memory_optimized_mlp=False "
    "mlp_type='mlp' mlp_impl='sparse' fp16=True bf16=False device init_method output_layer_init_method "
    "uniform_expert_assignment=False shared_expert=False fc_cls fc_kwargs remat_act_fn=True "
    "shared_expert_hidden_size=None shared_expert_weighted_sum=False moe_zloss_weight=0 moe_zloss_in_fp32=False"
).split()

# 0.10 refuses its own default with every Triton that its torch brings; a device is looked up when a layer is built.
OTHER_DEFAULTS = {"mlp_impl='sparse'": "mlp_impl='grouped'", "device": "device=None"}


def _resolve(path: str, depth: int):
    """`depth`: how many of the last parts are attributes."""
    parts = path.split(".")
    value = importlib.import_module(".".join(["megablocks", *parts[:-depth]]))
    for name in parts[-depth:]:
        value = getattr(value, name)
    return value


def _written(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is REQUIRED else f"={parameter.default!r}"
    return f"{stars}{parameter.name}{default}"


def _parameters(function: object) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


def _check_takes(function: object, wanted: list[str]) -> None:
    """Its own first, by name, order and default; one that is ours alone comes behind and has a default."""
    found = _parameters(function)
    assert [_written(p) for p in found[: len(wanted)]] == wanted
    for ours in found[len(wanted) :]:
        assert ours.default is None or ours.kind is inspect.Parameter.VAR_KEYWORD, ours


@pytest.mark.parametrize("path", [*FUNCTIONS, *METHODS])
def test_takes_the_arguments_of_0_10(path: str) -> None:
    _check_takes(_resolve(path, 2 if path in METHODS else 1), {**FUNCTIONS, **METHODS}[path].split())


@pytest.mark.parametrize("path", SCATTERMOE)
def test_takes_the_arguments_of_scattermoe(path: str) -> None:
    scattermoe = importlib.import_module("megablocks.layers.scattermoe")
    _check_takes(operator.attrgetter(path)(scattermoe), SCATTERMOE[path].split())


@pytest.mark.parametrize("path", OPERATORS)
def test_a_class_of_0_10_applies_its_function(path: str) -> None:
    kind, function = _resolve(path, 1), _resolve(OPERATORS[path], 1)
    assert kind.__name__ == path.rpartition(".")[2] and kind.apply is function


@pytest.mark.parametrize("path", VALUES)
def test_is_there(path: str) -> None:
    assert _resolve(path, 1) is not None


def test_version_is_the_package_s() -> None:
    assert _resolve("_version.__version__", 1) == megablocks.__version__


def test_arguments_are_positional_in_the_order_of_0_10() -> None:
    parameters = _parameters(megablocks.Arguments)
    assert all(p.default is not REQUIRED for p in parameters)
    wanted = [OTHER_DEFAULTS.get(field, field) for field in ARGUMENTS]
    found = [_written(p) if "=" in w else p.name for p, w in zip(parameters, wanted, strict=False)]
    assert found == wanted
    made = megablocks.Arguments()
    assert made.fc_cls is torch.nn.Linear and made.fc_kwargs == {}
    assert (made.activation_fn.func, made.activation_fn.keywords) == (F.gelu, {"approximate": "tanh"})
    for init in (made.init_method, made.output_layer_init_method):
        assert (init.func, init.args, init.keywords) == (torch.nn.init.normal_, (), {"mean": 0.0, "std": 0.02})


def test_top_level_names() -> None:
    names = "MoE dMoE get_load_balancing_loss ParallelMLP ParallelDroplessMLP SparseMLP MLP SparseGLU Arguments".split()
    assert set(names) <= set(megablocks.__all__)
    homes = {"MoE": "moe", "ParallelMLP": "moe", "SparseMLP": "mlp", "MLP": "mlp", "SparseGLU": "glu"}
    for name, module in homes.items():
        assert getattr(megablocks, name) is _resolve(f"layers.{module}.{name}", 1)
    assert megablocks.get_load_balancing_loss is _resolve("layers.moe.get_load_balancing_loss", 1)
    assert megablocks.ParallelDroplessMLP is _resolve("layers.dmoe.ParallelDroplessMLP", 1)


def test_ops_are_functions_however_they_are_imported() -> None:
    from megablocks.ops.cumsum import exclusive_cumsum
    from megablocks.ops.gather import gather as of_module
    from megablocks.ops.padded_scatter import padded_scatter as of_another

    from megablocks.ops import gather, padded_scatter

    assert of_module is gather is megablocks.ops.gather
    assert of_another is padded_scatter is megablocks.ops.padded_scatter
    assert exclusive_cumsum is megablocks.ops.exclusive_cumsum
    assert "topology" in dir(megablocks.ops)
    with pytest.raises(AttributeError, match="no attribute 'scatter'"):
        importlib.import_module("megablocks.ops.gather").scatter  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'scan'"):
        megablocks.ops.scan  # noqa: B018


FRESH = (
    "from megablocks.ops.sort import sort; from megablocks import ops; assert ops.sort is sort",
    "import megablocks.ops.sum as add; assert callable(add)",
    "import megablocks.ops.cumsum; assert callable(megablocks.ops.cumsum.inclusive_cumsum)",
    "import megablocks; assert callable(megablocks.ops.gather) and megablocks.layers.moe.MoE is megablocks.MoE",
    "import megablocks; assert callable(megablocks.backend.kernels.gather)",
    "import megablocks as m; m.layers.mpu.is_moe_param; m.layers.sharedexpert_registry.get; m.layers.glu.SharedGLU",
    "from megablocks import grouped_gemm_util as gg; assert gg.grouped_gemm_is_available()",
)
FORK = """
import os, sys
import megablocks.ops
assert "torch" not in sys.modules
import torch, torch.distributed, triton  # which each of the statements would import again
for name in [name for name in sys.modules if name.startswith("megablocks")]:
    del sys.modules[name]
for statement in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(statement)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(statement)
"""


def test_imports_from_a_fresh_interpreter() -> None:
    """Each statement is the first of its process that imports us. Torch has to be loaded once only."""
    done = subprocess.run([sys.executable, "-c", FORK, *FRESH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
