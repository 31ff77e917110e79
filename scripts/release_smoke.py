"""A user's first steps with an installed package: import it, run a layer on the CPU, call the tool.

python scripts/release_smoke.py       in an environment with the wheel, from an empty folder
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.util import find_spec


def main() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    spec = find_spec("megablocks")
    found = None if spec is None else spec.origin
    if not (found or "").startswith(sys.prefix):
        sys.exit(f"release_smoke: megablocks is {found}: must be installed from a wheel into {sys.prefix}")
    import megablocks

    assert "torch" not in sys.modules, "the import of megablocks loads no torch"
    import torch

    config = megablocks.MoEConfig(hidden_size=32, ffn_hidden_size=64, num_experts=4, top_k=2, activation="swiglu")
    x = torch.randn(20, 32)
    grads = {}
    for impl in ("reference", "auto", "fused", "grouped", "sparse", "scatter"):
        from megablocks.moe import dMoE

        torch.manual_seed(0)
        layer = dMoE(config.replace(mlp_impl=impl), device="cpu", dtype=torch.float32)
        y, aux = layer.forward_with_aux(x)
        y.square().mean().backward()
        assert int(aux.metrics["tokens_per_expert"].sum()) == 40
        grads[impl] = [y.detach(), *(p.grad for p in layer.parameters())]
        torch.testing.assert_close(grads[impl], grads["reference"], rtol=1e-4, atol=1e-6)
    for command in (["env"], ["--help"]):
        subprocess.run([sys.executable, "-m", "megablocks", *command], check=True, stdout=subprocess.DEVNULL)
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"release_smoke: megablocks {megablocks.__version__} on {versions}")


if __name__ == "__main__":
    main()
