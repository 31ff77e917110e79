"""Every kernel of the package compiles for every architecture, within its shared memory, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megablocks.testing.compile_only import SHARED_BYTES, kernels_of_the_package

from .compile_cases import ARCHITECTURES, FAMILIES, conditional_reductions, fused_across_lanes, stores_in_two_steps


def compile_families(architecture: int, cache: Path, *arguments: str) -> dict[str, tuple[int, int, int]]:
    """Kernel → what compile_cases.py prints of it; by another process, as Triton may be interpreted here."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")}
    program = [sys.executable, str(Path(__file__).with_name("compile_cases.py")), str(architecture), *arguments]
    done = subprocess.run(program, env=environment | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check(architecture: int, cache: Path, *families: str, few: bool = False) -> None:
    chosen = [FAMILIES[name] for name in families or FAMILIES if architecture in FAMILIES[name].architectures]
    compiled = compile_families(architecture, cache, *(["--few"] if few else []), *families)
    assert set(compiled) == set().union(*(one.kernels for one in chosen))
    for kernel, (shared, binaries, fused, waits) in compiled.items():
        assert binaries > 0 and shared <= SHARED_BYTES[architecture], f"{kernel} needs {shared} bytes of shared memory"
        assert not fused, f"{kernel}: lanes of one sum hold different bits"
        assert not waits, f"{kernel}: reads what another GPU wrote without an acquire"


def test_every_kernel_of_the_package_is_in_a_family() -> None:
    assert set(ARCHITECTURES) == set(SHARED_BYTES)
    covered = [kernel for one in FAMILIES.values() for kernel in one.kernels]
    assert len(covered) == len(set(covered)) and set(covered) == kernels_of_the_package()


def test_the_families_for_hopper_are_those_that_ci_compiles_with_other_releases() -> None:
    script = (Path(__file__).parents[2] / "scripts/compile_releases.sh").read_text()
    (names,) = re.findall(r"^families=\((.*)\)$", script, re.MULTILINE)
    assert set(names.split()) == {name for name, one in FAMILIES.items() if one.architectures == (90,)}


def test_one_family_compiles_for_the_architecture_with_the_least_shared_memory(tmp_path: Path) -> None:
    check(86, tmp_path, "bias", few=True)


@pytest.mark.parametrize(
    "family",
    ["quant", *(pytest.param(name, marks=pytest.mark.slow) for name in ("router", "scattered"))],
)
def test_N12_lanes_of_one_sum_hold_the_same_bits(family: str, tmp_path: Path) -> None:
    """Where racecheck, on a GPU, reported two kernels and missed a third. The slow tests below compile all binaries."""
    check(90, tmp_path, family, few=family == "quant")


def test_zeros_are_stored_before_the_gradients_in_their_place(tmp_path: Path) -> None:
    """Other warps store them, so without a barrier either may come last. The interpreter stores one after the other."""
    check(90, tmp_path, "router_weights")
    assert stores_in_two_steps("st.global.v4 bar.sync 0;\n st.global.b32")
    assert not stores_in_two_steps("bar.sync 0;\n st.global.v4 st.global.b32")


def test_a_product_fused_across_lanes_is_seen() -> None:
    ptx = """
        mul.rn.f32 %r1, %r2, %r3;
        shfl.sync.bfly.b32 %r4, %r1, 16, 31, -1;
        mov.b32 %r5, %r4;
        fma.rn.f32 %r6, %r2, %r3, %r5;
    """
    assert fused_across_lanes(ptx) == 1
    assert fused_across_lanes(ptx.replace("%r5;", "%r1;")) == 0


def test_a_conditional_reduction_is_seen() -> None:
    code = """
        /*0c80*/                   REDUX.MAX.S32 UR5, R23 ;
        /*0ca0*/               @P6 SEL R20, R24, RZ, !P5 ;
        /*0cb0*/               @P0 REDUX.SUM.S32 UR14, R20 ;
        /*0cc0*/             @!UP0 CREDUX.MIN UR4, R2 ;
    """
    assert conditional_reductions(code) == 2
    assert conditional_reductions(code.replace("@P0", "").replace("@!UP0", "")) == 0
    with pytest.raises(AssertionError, match="no reduction over a warp"):
        conditional_reductions("EXIT ;")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_within_shared_memory(architecture: int, tmp_path: Path) -> None:
    check(architecture, tmp_path)
