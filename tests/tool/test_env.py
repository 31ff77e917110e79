"""`env`: versions, and each op's kernel by the op's own decision."""

from __future__ import annotations

import json

import pytest
import torch

from megablocks.ops import hopper
from megablocks.tool import env
from megablocks.tool.commands import main

GPU = torch.device("cuda", 0)


def test_json_and_text_hold_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(found["versions"]["torch"]) and set(env.PACKAGES) <= set(found["versions"])
    assert set(found["ops"]) == set(env.paths())
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for family, row in found["ops"].items():
        assert f"{family:<10}{row['kernel']:<16}{row['why']}" in text
    assert all(f"{name + ':':<20}{value}" in text for name, value in found["versions"].items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels run")
def test_without_a_gpu_the_references_run() -> None:
    why = "no GPU" if torch.version.cuda else "this torch is built without CUDA"
    assert set(map(tuple, (row.values() for row in env.paths().values()))) == {(env.REFERENCE, why)}


@pytest.mark.gpu
def test_on_hopper_the_switch_leaves_out_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hopper.is_available():
        pytest.skip("no Hopper kernels here")
    found = env.paths()
    assert {found[name]["kernel"] for name in env.WITH_HOPPER} == {env.HOPPER}
    assert {row["kernel"] for name, row in found.items() if name not in env.WITH_HOPPER} == {env.TRITON}
    monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
    found = env.paths()
    assert found["grouped"] == {"kernel": env.TORCH, "why": "MEGABLOCKS_HOPPER=0"}
    assert found["sparse"] == {"kernel": env.TRITON, "why": "MEGABLOCKS_HOPPER=0"}


def test_the_reason_of_each_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(hopper, "is_hopper", lambda device: False)
    assert env.reason("norm", env.TRITON, GPU) == "one kernel for every GPU"
    assert env.reason("fused", env.TRITON, GPU) == "compute capability 8.0; Hopper is 9.0"
    assert env.reason("router", env.REFERENCE, GPU) == "not supported by the kernels"
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    assert env.reason("fused", env.HOPPER, GPU) == "Hopper GPU"
    monkeypatch.setattr(hopper, "has_gluon", lambda: False)
    assert env.reason("fused", env.TRITON, GPU).endswith("; kernels for Hopper need >=3.6,<3.10")
    monkeypatch.setenv("MEGABLOCKS_HOPPER", "0")
    assert env.reason("sparse", env.TRITON, GPU) == "MEGABLOCKS_HOPPER=0"


def test_every_implementation_is_a_family() -> None:
    from megablocks.kinds import IMPLS

    assert set(IMPLS) - {"reference"} <= set(env.paths())
