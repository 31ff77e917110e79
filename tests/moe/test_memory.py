"""Out of memory in a layer: the same exception, with the sizes and what to change."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from megablocks import MoEConfig
from megablocks.moe import MoE, dMoE
from megablocks.ops.routing.dispatch import Routing

SAID = re.compile(
    r"out of memory in a mixture-of-experts layer on \S+: (\d+) tokens, hidden_size=(\d+), ffn_hidden_size=(\d+), "
    r"num_experts=(\d+), top_k=(\d+), torch\.(\w+); the experts' (\d+) rows take about (\S+) GiB in forward, "
    r"free on the device: (unknown|\S+ of \S+ GiB)\. Try (.*? \(expert parallelism\))\. (.*)",
    re.S,
)


def test_F5_the_message_names_sizes_and_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch raises on a GPU, raised here by the experts' place in the layer."""
    config = MoEConfig(hidden_size=8, ffn_hidden_size=64, num_experts=4, top_k=2, activation="swiglu")

    def exhausted(self: dMoE, x: torch.Tensor, routing: Routing) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    for kind in (dMoE, MoE):
        monkeypatch.setattr(kind, "_dispatch", exhausted)
    for changed, offered in (
        ({}, "recompute_activation=True, "),
        ({"mlp_impl": "sparse"}, "recompute_activation=True, mlp_impl='grouped' (no padded rows), "),
        ({"recompute_activation": True, "mlp_impl": "grouped"}, ""),
        ({"recompute_activation": True, "mlp_impl": "fused"}, ""),
        ({"recompute_activation": True, "capacity_factor": 2.0}, "a smaller capacity_factor or dMoE (no padding), "),
    ):
        kind = MoE if "capacity_factor" in changed else dMoE
        layer = kind(config.replace(**changed), dtype=torch.float32)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            layer.forward_with_aux(torch.zeros(3, 1024, 8))
        said = SAID.fullmatch(str(raised.value))
        assert said is not None, str(raised.value)
        assert said.groups()[:7] == ("3072", "8", "64", "4", "2", "float32", "6144")
        # a row and its output, two pre-activations and one activation
        assert said[8] == f"{6144 * (2 * 8 + 3 * 64) * 4 / 2**30:.2f}" and said[9] == "unknown"
        assert said[10] == f"fewer tokens a micro-batch, {offered}experts spread over more ranks (expert parallelism)"
        assert said[11] == "CUDA out of memory. Tried to allocate 2.00 GiB."
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


# In a process of its own: in another test's, room that torch keeps could be enough.
PROGRAM = """
import sys
import torch
from megablocks import MoEConfig, dMoE
from megablocks.layers.moe import MoE

capacity = float(sys.argv[1]) or None
config = MoEConfig(
    hidden_size=1024, ffn_hidden_size=4096, num_experts=8, top_k=2, capacity_factor=capacity, mlp_impl="grouped"
)
layer = (MoE if capacity else dMoE)(config, device="cuda", dtype=torch.bfloat16)
x = torch.randn(16384, 1024, device="cuda", dtype=torch.bfloat16)
before = layer(x[:512])
torch.cuda.empty_cache()
total = torch.cuda.mem_get_info()[1]
# 32768 rows of 2·1024 + 2·4096 values are 640 MiB; a quarter of that is allowed
torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 160 * 2**20) / total)
try:
    layer(x)
except torch.OutOfMemoryError as error:
    print(total / 2**30)
    print(error)
    del error
    assert torch.equal(layer(x[:512]), before), "the layer does not go on"
"""


@pytest.mark.gpu
@pytest.mark.parametrize("capacity_factor", ["0", "1"])
def test_F5_a_full_gpu_is_explained_and_survived(capacity_factor: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, capacity_factor], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    total, message = done.stdout.split("\n", 1)
    said = SAID.fullmatch(message.rstrip("\n"))
    assert said is not None, done.stdout
    assert said.groups()[:8] == ("16384", "1024", "4096", "8", "2", "bfloat16", "32768", "0.62")
    free, whole = (float(number) for number in said[9].removesuffix(" GiB").split(" of "))
    assert 0 < free < whole == pytest.approx(float(total), abs=0.01)
    assert "Tried to allocate" in said[11]
