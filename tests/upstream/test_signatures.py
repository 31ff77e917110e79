"""The surface of megablocks 0.10: every name is where it was and takes the arguments that it took."""

import importlib
import inspect
import subprocess
import sys

import pytest

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
    "layers.dmoe.dMoE": "args",
    "layers.gelu.gelu": "x",
    "layers.gelu.gelu_backward_": "grad x",
    "layers.glu.GroupedGLU": "args",
    "layers.glu.SharedGLU": "args",
    "layers.glu.SparseGLU": "args",
    "layers.mlp.GroupedMLP": "args",
    "layers.mlp.MLP": "args",
    "layers.mlp.SharedMLP": "args",
    "layers.mlp.SparseMLP": "args",
    "layers.moe.MoE": "args",
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
    "grouped_gemm_util.grouped_gemm_is_available": "",
    "grouped_gemm_util.assert_grouped_gemm_is_available": "",
}

METHODS = {
    "layers.dmoe.ParallelDroplessMLP.forward": "x scores expert_weights top_experts",
    "layers.dmoe.dMoE.forward": "x",
    "layers.glu.GroupedGLU.forward": "x tokens_per_expert",
    "layers.glu.MemoryOptimizedGroupedGLU.apply": "x w1 v1 w2 batch_sizes activation_fn",
    "layers.glu.SharedGLU.forward": "x",
    "layers.glu.SparseGLU.forward": "x topo",
    "layers.mlp.GroupedMLP.forward": "x tokens_per_expert",
    "layers.mlp.MLP.forward": "x",
    "layers.mlp.MemoryOptimizedGroupedMLP.apply": "x w1 w2 batch_sizes activation_fn",
    "layers.mlp.MemoryOptimizedMLP.apply": "x w1 w2 topo activation_fn",
    "layers.mlp.SharedMLP.add_experts_sharedexpert": "shared_expert_out expert_out",
    "layers.mlp.SharedMLP.forward": "x",
    "layers.mlp.SparseMLP.forward": "x topo",
    "layers.moe.MoE.forward": "x",
    "layers.moe.ParallelMLP.expert_capacity": "tokens",
    "layers.moe.ParallelMLP.forward": "x scores expert_weights top_experts",
    "layers.router.LearnedRouter.forward": "x",
}

ARGUMENTS = (
    "hidden_size ffn_hidden_size num_layers bias return_bias activation_fn moe_num_experts moe_top_k "
    "moe_capacity_factor moe_normalize_expert_weights moe_loss_weight moe_jitter_eps moe_lbl_in_fp32 "
    "moe_expert_model_parallelism expert_parallel_group pipeline_model_parallel_size "
    "num_layers_per_virtual_pipeline_stage memory_optimized_mlp mlp_type mlp_impl fp16 bf16 device init_method "
    "output_layer_init_method uniform_expert_assignment shared_expert fc_cls fc_kwargs remat_act_fn "
    "shared_expert_hidden_size shared_expert_weighted_sum moe_zloss_weight moe_zloss_in_fp32"
).split()


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


@pytest.mark.parametrize("path", [*FUNCTIONS, *METHODS])
def test_takes_the_arguments_of_0_10(path: str) -> None:
    """Its own first, by name, order and default; one that is ours alone comes behind and has a default."""
    function = _resolve(path, 2 if path in METHODS else 1)
    wanted = {**FUNCTIONS, **METHODS}[path].split()
    found = _parameters(function)
    assert [_written(p) for p in found[: len(wanted)]] == wanted
    for ours in found[len(wanted) :]:
        assert ours.default is not REQUIRED and ours.default is None, ours


def test_arguments_are_positional_in_the_order_of_0_10() -> None:
    parameters = _parameters(megablocks.Arguments)
    assert [p.name for p in parameters[: len(ARGUMENTS)]] == ARGUMENTS
    assert all(p.default is not REQUIRED for p in parameters)


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
    with pytest.raises(AttributeError, match="no attribute 'cumsum'"):
        megablocks.ops.cumsum  # noqa: B018


@pytest.mark.parametrize(
    "statement",
    [
        "import megablocks.ops; import sys; assert 'torch' not in sys.modules",
        "from megablocks.ops.sort import sort; from megablocks import ops; assert ops.sort is sort",
        "import megablocks.ops.sum as add; assert callable(add)",
        "import megablocks; assert callable(megablocks.ops.gather) and megablocks.layers.moe.MoE is megablocks.MoE",
        "import megablocks as m; m.layers.mpu.is_moe_param; m.layers.sharedexpert_registry.get; m.layers.glu.SharedGLU",
        "from megablocks import grouped_gemm_util as gg; assert gg.grouped_gemm_is_available()",
    ],
)
def test_imports_from_a_fresh_interpreter(statement: str) -> None:
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
