"""A transformers model of Qwen3-30B-A3B's shape: our experts beside those of transformers.

    python benchmarks/hugging_face.py [--layers N] [--tokens N] [--rounds N] [--cases NAME,…] [--brief] [--liger]

Four layers, bf16, without the output head: hidden 2048, 128 experts of width 768, top-8. The cases:

  train    forward and backward, every parameter trained
  frozen   the same with frozen experts
  lora     the same with PEFT's LoRA of rank 16 on the experts alone, where peft is installed
  decode   forward without a gradient at 1, 2, 4, 8 and 64 tokens
  kernels  the experts of these forwards alone, launched while the GPU waits: the host's time does not count
  gpt-oss  forward and backward of one layer's experts of gpt-oss-20b's shape alone: hidden and width 2880, 32 experts,
           top-4, biases and a clamped gate

The arms are transformers' grouped_mm, batched_mm (decode) and sonicmoe where it loads; ours as it chooses, and each of
its ways by itself. --brief leaves the ways out where tokens are few. --liger gives every arm the norms and rotary
embeddings of the package liger-kernel. First each arm's experts are compared with float32, and the gradients of those
that train. Prints medians in milliseconds, the speed beside grouped_mm (tokens are few: beside the faster of
transformers' own) and the peak memory of a step. --toy runs small on a CPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from children import add_names, option_parser
from measure import TOLERANCE, Gate, dry_run, interleave, milliseconds, need_gpu, on_gpu, relative_error, speed

THEIRS = ("grouped_mm", "batched_mm", "sonicmoe")
WAYS = ("fused", "grouped", "few")
OURS = ("megablocks", *(f"megablocks_{way}" for way in WAYS))
FORWARD_ONLY = ("batched_mm", "megablocks_few")
DECODE = (1, 2, 4, 8, 64)
CASES = ("decode", "kernels", "train", "gpt-oss", "frozen", "lora")
SIZES = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
TOY = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}


def make_model(layers: int, toy: bool, liger: bool = False) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3_moe(swiglu=False, fused_linear_cross_entropy=False)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    if toy:
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = Qwen3MoeConfig(
        **(TOY if toy else SIZES), **heads, num_hidden_layers=layers, vocab_size=1024, norm_topk_prob=True
    )
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu() else "cpu"):
        return Qwen3MoeModel(config).to(torch.bfloat16)


def make_gpt_oss(toy: bool) -> Any:
    """One layer's experts of gpt-oss, with what this file reads of a model."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    config = GptOssConfig(**(sizes if toy else GPT_OSS))
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu() else "cpu"):
        experts = GptOssExperts(config).to(torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return SimpleNamespace(
        config=config, layers=[SimpleNamespace(mlp=SimpleNamespace(experts=experts))], device=experts.down_proj.device,
        set_experts_implementation=lambda arm: setattr(experts.config, "_experts_implementation", arm),
    )  # fmt: skip


def register() -> None:
    """Ours, and each of its ways under a name of its own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    import megablocks.hf
    from megablocks.hf import experts

    megablocks.hf.register()

    def one_way(way: str, module: Any, x: Any, ids: Any, weights: Any) -> Any:
        call = experts.read_call(module, x)
        if way == "few":
            return experts.few(call, ids, weights)
        routing = experts.routing_of(ids, weights, call.up.w.shape[0])
        return experts.WAYS[way](call, experts.build_dispatch(routing), routing.weight)

    for way in WAYS:
        ALL_EXPERTS_FUNCTIONS.register(f"megablocks_{way}", partial(one_way, way))


def check(model: Any, gate: Gate, arms: tuple[str, ...] = (*THEIRS, *OURS)) -> None:
    """The first layer's experts of each arm, and their gradients, against the loop over experts in float32."""
    experts = model.layers[0].mlp.experts
    config, device = model.config, experts.down_proj.device
    x = torch.randn(256, config.hidden_size, device=device)
    scores, ids = torch.rand(256, config.num_experts, device=device).topk(config.num_experts_per_tok)
    truth = copy.deepcopy(experts).float()
    truth.config = copy.deepcopy(config)
    truth.config._experts_implementation = "eager"
    dy = torch.randn_like(x).bfloat16()

    def results(module: Any, x: Any, scores: Any, trains: bool) -> list[Any]:
        """Output, and gradients of x, of the scores and of the parameters."""
        inputs = [x.requires_grad_(), scores.requires_grad_(), *module.parameters()]
        with torch.set_grad_enabled(trains):
            y = module(x, ids, scores)
        return [y.detach(), *(torch.autograd.grad(y, inputs, dy.to(y.dtype)) if trains else ())]

    want = results(truth, x.bfloat16().float(), scores.clone(), True)
    for arm in arms:
        try:
            model.set_experts_implementation(arm)
            got = results(experts, x.bfloat16(), scores.bfloat16(), arm not in FORWARD_ONLY)
            error = max(relative_error(one, of) for one, of in zip(got, want, strict=False))
        except Exception as e:  # a peer that does not load is left out
            gate.take({"bad": arm, "why": f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"})
            continue
        gate.judge(arm, error, TOLERANCE)


Step = Callable[[], Any]


def step_of(model: Any, tokens: Any, train: bool) -> Step:
    def step() -> None:
        if not train:
            with torch.no_grad():
                model(tokens, use_cache=False)
            return
        model.zero_grad(set_to_none=True)
        model(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()

    return step


def kernels_of(model: Any, count: int) -> Step:
    """The experts of all layers, one after the other, with pairs of each layer's own."""
    config, device = model.config, model.device
    x = torch.randn(count, config.hidden_size, device=device, dtype=torch.bfloat16)
    chances = [torch.rand(count, config.num_experts, device=device) for _ in model.layers]
    pairs = [(ids, scores.bfloat16()) for scores, ids in (c.topk(config.num_experts_per_tok) for c in chances)]

    def step() -> None:
        with torch.no_grad():
            for layer, (ids, scores) in zip(model.layers, pairs, strict=True):
                layer.mlp.experts(x, ids, scores)

    return step


def experts_step(model: Any, count: int) -> Step:
    """Forward and backward of the first layer's experts, with every gradient."""
    experts, config, device = model.layers[0].mlp.experts, model.config, model.device
    x = torch.randn(count, config.hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores, ids = torch.rand(count, config.num_experts, device=device).topk(config.num_experts_per_tok)
    dy, scores = torch.randn_like(x), scores.bfloat16().requires_grad_()

    def step() -> None:
        torch.autograd.grad(experts(x, ids, scores), (x, scores, *experts.parameters()), dy)

    return step


def report(
    name: str, model: Any, arms: list[str], step: Step, rounds: int, bases: tuple[str, ...], *, calls: int = 1,
    head_start_ms: float = 0.0,
) -> None:  # fmt: skip
    def timed(arm: str) -> float:
        model.set_experts_implementation(arm)
        return milliseconds(step, calls, head_start_ms=head_start_ms)

    peaks = {}
    for arm in arms:
        model.set_experts_implementation(arm)
        step()
        if on_gpu():
            torch.cuda.reset_peak_memory_stats()
            step()
            peaks[arm] = f"{torch.cuda.max_memory_allocated() / 2**30:8.2f} GiB"
    times = interleave({arm: partial(timed, arm) for arm in arms}, rounds, warm_up=2)
    base = min((arm for arm in bases if arm in times), key=lambda arm: median(times[arm]))
    for arm, measured in times.items():
        beside = f"{speed(times, arm, base):6.2f} x {base}"
        print(f"{name:12} {arm:20} {median(measured):9.3f} ms {beside:20} {peaks.get(arm, '')}".rstrip())


def lora_of(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return get_peft_model(model, LoraConfig(r=16, target_modules=[], target_parameters=names)).get_base_model()


def compare_gpt_oss(tokens: int, rounds: int, toy: bool) -> bool:
    """Whether the results were right."""
    alone, gate, arms = make_gpt_oss(toy), Gate(ours=lambda arm: arm in OURS), ("grouped_mm", OURS[0])
    check(alone, gate, arms)
    if gate.report():
        report("gpt-oss", alone, list(arms), experts_step(alone, tokens), rounds, ("grouped_mm",))
    return gate.green


def main() -> int:
    parser = option_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=9)
    add_names(parser, "--cases", CASES)
    parser.add_argument("--liger", action="store_true", help="norms and rotary embeddings of liger-kernel")
    parser.add_argument("--brief", action="store_true", help="without most of our ways by themselves")
    parser.add_argument("--toy", action="store_true", help="small sizes, on a CPU too; its times mean nothing")
    options = parser.parse_args()
    cases = options.cases
    tokens = min(options.tokens, 64) if options.toy else options.tokens
    print(f"{options.layers} layers, {tokens} tokens, {TOY if options.toy else SIZES}")
    if dry_run():
        return 0
    need_gpu(options.toy)
    register()
    model = make_model(options.layers, options.toy, options.liger)
    device, rows = model.device, max(1, tokens // 4096)
    gate = Gate(ours=lambda arm: arm in OURS)
    check(model, gate)
    if not gate.report():
        return 1
    arms = [arm for arm in (*THEIRS, *OURS) if arm in gate.errors]
    generating = [arm for arm in arms if arm in (*THEIRS, OURS[0])] if options.brief else arms
    for count in DECODE if "decode" in cases else ():
        ids = torch.randint(1024, (count, 1), device=device)
        step = step_of(model, ids, False)
        report(f"decode {count}", model, generating, step, options.rounds, THEIRS, calls=5)
    for count in DECODE if "kernels" in cases else ():
        step = kernels_of(model, count)
        report(f"kernels {count}", model, generating, step, options.rounds, THEIRS, calls=3, head_start_ms=30)
    ids = torch.randint(1024, (rows, tokens // rows), device=device)
    arms = [arm for arm in arms if arm not in FORWARD_ONLY]
    if "train" in cases:
        report("train", model, arms, step_of(model, ids, True), options.rounds, ("grouped_mm",))
    if "gpt-oss" in cases and not compare_gpt_oss(tokens, options.rounds, options.toy):
        return 1
    for layer in model.layers:
        layer.mlp.experts.requires_grad_(False)
    if "frozen" in cases:
        report("frozen", model, arms, step_of(model, ids, True), options.rounds, ("grouped_mm",))
    if "lora" not in cases:
        return 0
    try:
        tuned = lora_of(model)
    except ImportError:
        print("lora: peft is not installed")
        return 0
    arms = [arm for arm in arms if arm != "megablocks_fused"]  # it reads no factors
    report("lora", tuned, arms, step_of(tuned, ids, True), options.rounds, ("grouped_mm",))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
