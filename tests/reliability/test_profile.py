"""A profiled run of the real driver: its trace names the parts of a step; the sizes for the bounds lie beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.training")

from driver import EXPERTS, Driver  # noqa: E402

from megablocks.monitor.bounds import RunSizes  # noqa: E402
from megablocks.monitor.parts import PARTS, part_of  # noqa: E402
from megablocks.monitor.profile_step import profile_of  # noqa: E402
from megablocks.monitor.trace import read_step  # noqa: E402

FLAGS = "--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4".split()


def test_a_profiled_run_names_every_part(driver: Driver, tmp_path: Path) -> None:
    driver.run(*EXPERTS, *FLAGS, "--train-iters", "6", "--tensorboard-dir", tmp_path / "run" / "tensorboard")
    run = RunSizes.read(tmp_path / "run/torch_profile/run.json")
    assert (run.tokens, run.micro_batches, run.device, run.element_bytes) == (4 * 32, 2, "cpu", 4)
    assert run.expert_parameters == 2 * 4 * 2 * 32 * 64 and run.tokens_per_second is not None
    step = read_step(tmp_path / "run/torch_profile/rank-0.json.gz")
    profile = profile_of(step, run)
    times = {row.part: row.ms for row in profile.rows}
    assert set(times) >= set(PARTS) - {"other", "communication"}
    assert sum(times.values()) == pytest.approx(profile.ms)
    lost = [kernel.callers for kernel in step.kernels if part_of(kernel) == "other"]
    assert not [callers for callers in lost if "aten::mm" in callers or "aten::bmm" in callers]
    assert len(lost) < 0.05 * len(step.kernels), "the data loader's, which launches nothing on a GPU"
    assert all(times[part] > 0 for part in times)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--profile", "profile=True: needs a GPU, or --use-pytorch-profiler"),
        ("--log-device-memory-used", "log_device_memory_used=True: needs a GPU and the package nvidia-ml-py"),
    ],
)
def test_L2_what_only_a_gpu_can_tell_is_refused_before_training(driver: Driver, flags: str, message: str) -> None:
    run = driver.run("--train-iters", "6", flags, expect=2)
    assert f"pretrain_gpt: {message}" in run.text() and "Traceback" not in run.text()


def test_L2_the_profiler_needs_a_folder(driver: Driver) -> None:
    run = driver.run(*FLAGS, "--train-iters", "6", expect=2)
    assert "pretrain_gpt: tensorboard_dir=None: --use-pytorch-profiler writes beside it" in run.text()
