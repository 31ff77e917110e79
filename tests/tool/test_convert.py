"""`convert` without transformers and Megatron: files written by hand, and everything that must be refused."""

from __future__ import annotations

import json
import re
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megablocks.checkpoint import layout, safetensors
from megablocks.checkpoint.atomic import CheckpointError
from megablocks.checkpoint.families import FAMILIES, check_computable, config_differences, model_of
from megablocks.checkpoint.journal import Journal
from megablocks.config import ConfigError, MoEConfig
from megablocks.files import exclusive
from megablocks.moe.layer import dMoE
from megablocks.tool.commands import main
from megablocks.tool.convert import convert

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 8, 12
CONFIG: dict[str, Any] = {
    "model_type": "mixtral", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 10, "num_experts_per_tok": 2, "num_local_experts": EXPERTS,
    "intermediate_size": WIDTH, "rms_norm_eps": 1e-5, "max_position_embeddings": 16, "rope_theta": 1e6,
}  # fmt: skip
QWEN = {**CONFIG, "model_type": "qwen3_moe", "moe_intermediate_size": WIDTH, "mlp_only_layers": [0], "head_dim": 4}

YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "original_max_position_embeddings": 4096}  # fmt: skip
_PLAIN = {name: value for name, value in CONFIG.items() if name != "num_local_experts"}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": CONFIG | {"sliding_window": None, "tie_word_embeddings": False, "rope_scaling": None},
    "olmoe": _PLAIN | {"num_experts": EXPERTS, "norm_topk_prob": False, "clip_qkv": None},
    "qwen3_moe": _PLAIN | {
        "num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "mlp_only_layers": [0], "head_dim": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "deepseek_v3": _PLAIN | {
        "n_routed_experts": 6, "moe_intermediate_size": 12, "n_shared_experts": 1, "n_group": 3, "topk_group": 2,
        "num_experts_per_tok": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "q_lora_rank": 6,
        "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "rms_norm_eps": 1e-6,
        "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.6},
    },
    "gpt_oss": CONFIG | {
        "swiglu_limit": 7.0, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": YARN | {"truncate": False},
    },
}  # fmt: skip


def _tensors(family: str = "mixtral") -> dict[str, Tensor]:
    """What a file of the family holds, by the names that the families' own files have."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (10, HIDDEN), "lm_head.weight": (10, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (HIDDEN,)
        for name, rows in (("q", HIDDEN), ("k", 4), ("v", 4), ("o", HIDDEN)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        if family == "qwen3_moe":
            shapes |= {f"{at}self_attn.{name}_norm.weight": (4,) for name in "qk"}
        mixture, gate, up, down = at + "block_sparse_moe.", "w1", "w3", "w2"
        if family == "qwen3_moe":
            mixture, gate, up, down = at + "mlp.", "gate_proj", "up_proj", "down_proj"
        if family == "qwen3_moe" and layer == 0:
            experts = [mixture]
        else:
            shapes[f"{mixture}gate.weight"] = (EXPERTS, HIDDEN)
            experts = [f"{mixture}experts.{e}." for e in range(EXPERTS)]
        for expert in experts:
            shapes |= {f"{expert}{name}.weight": (WIDTH, HIDDEN) for name in (gate, up)}
            shapes[f"{expert}{down}.weight"] = (HIDDEN, WIDTH)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], shard_bytes: int = 10**9) -> Path:
    new = [
        safetensors.NewTensor(name, tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: [tensor])
        for name, tensor in tensors.items()
    ]
    journal = Journal(folder, {"of": "a test"})
    safetensors.write_folder(journal, new, shard_bytes, lambda size: None)
    journal.close()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _read(folder: Path) -> dict[str, Tensor]:
    files = safetensors.SafetensorsFolder(folder)
    return {name: files.read(name, 0, shape) for name, shape in files.shapes().items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _write(tmp_path / "hf", _tensors(), CONFIG)


def _layer_of(tensors: dict[str, Tensor], experts: str, gate: str, up: str, down: str) -> dict[str, Tensor]:
    """A `dMoE`'s matrices, stacked by hand."""
    names = {"w1": gate, "v1": up, "w2": down}
    matrices = {ours: [tensors[f"{experts}{e}.{name}.weight"] for e in range(EXPERTS)] for ours, name in names.items()}
    matrices["w2"] = [matrix.t() for matrix in matrices["w2"]]
    return {f"experts.{name}": torch.cat(found) for name, found in matrices.items()}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_K10_ours_is_the_state_dict_of_our_layer(family: str, tmp_path: Path) -> None:
    tensors = _tensors(family)
    config, at = CONFIG if family == "mixtral" else QWEN, "model.layers.1."
    if family == "qwen3_moe":  # transformers 5.24 keeps the routers of some families in float32
        tensors[f"{at}mlp.gate.weight"] = tensors[f"{at}mlp.gate.weight"].float() / 3
    source = _write(tmp_path / "hf", tensors, config)
    convert(source, tmp_path / "ours", "ours")
    ours = _read(tmp_path / "ours")
    if family == "mixtral":
        expected = _layer_of(tensors, at + "block_sparse_moe.experts.", "w1", "w3", "w2")
        expected["router.layer.weight"] = tensors[f"{at}block_sparse_moe.gate.weight"]
    else:
        expected = _layer_of(tensors, at + "mlp.experts.", "gate_proj", "up_proj", "down_proj")
        expected["router.layer.weight"] = tensors[f"{at}mlp.gate.weight"]
    layer = {name.removeprefix(f"{at}mlp."): value for name, value in ours.items() if name.startswith(f"{at}mlp.")}
    assert layer.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(layer[name], tensor), name
    moe = MoEConfig.from_dict(json.loads((tmp_path / "ours/moe_config.json").read_text()))
    dMoE(moe, dtype=torch.bfloat16).load_state_dict(layer, strict=True)
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again = _read(tmp_path / "again")
    assert again.keys() == tensors.keys()
    assert all(again[name].dtype == value.dtype and torch.equal(again[name], value) for name, value in tensors.items())


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    tensors = _tensors()
    folder = _write(tmp_path / "hf", tensors, CONFIG, shard_bytes=1000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 3
    found = _read(folder)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], value) for name, value in tensors.items())
    official = pytest.importorskip("safetensors.torch")
    for path in folder.glob("*.safetensors"):
        for name, value in official.load_file(path).items():
            assert torch.equal(value, tensors[name]), name
        assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0, "the format requires aligned data"
    index = json.loads((folder / safetensors.INDEX).read_text())["weight_map"]
    shutil.copy(folder / index["lm_head.weight"], tmp_path / "outside")
    for changed, said in (
        ({**index, "lm_head.weight": "../outside"}, "outside: missing; model.safetensors.index.json names it"),
        ({name: file for name, file in index.items() if name != "lm_head.weight"}, "lm_head.weight: only model-0"),
        ({**index, "more": index["lm_head.weight"]}, "more: only model.safetensors.index.json has it"),
    ):
        (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=said):
            convert(folder, tmp_path / "to", "ours")
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": index}))
    next(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"model-0000\d-of-\d+.safetensors: missing"):
        convert(folder, tmp_path / "to", "ours")


def test_one_file_counts_beside_an_index(tmp_path: Path) -> None:
    """transformers leaves the index, or the file, of an earlier save in the folder, and then loads the file."""
    tensors = _tensors()
    folder = _write(tmp_path / "hf", {name: 2 * value for name, value in tensors.items()}, CONFIG, shard_bytes=1000)
    shutil.copy(_write(tmp_path / "one", tensors, CONFIG) / safetensors.WHOLE, folder)
    for name in ("ours", "again"):
        convert(folder, tmp_path / name, "ours")
        assert torch.equal(_read(tmp_path / name)["model.norm.weight"], tensors["model.norm.weight"])
        for shard in folder.glob("model-*"):
            shard.unlink()


def _remove(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=t["lm_head.weight"]), r"hf: extra: unknown key"),
        (lambda t: _remove(t, "model.layers.1.block_sparse_moe.experts.2.w3.weight"),
         r"model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight: missing key"),
        (lambda t: t.update({"model.norm.weight": torch.ones(HIDDEN + 1)}),
         r"model\.norm\.weight has shape \(9,\), must be \(8,\): the sizes in config\.json or in the run's"),
        (lambda t: t.update({"model.layers.0.block_sparse_moe.experts.1.w1.weight": torch.ones(WIDTH, HIDDEN)}),
         r"layers\.0\.mlp\.experts\.1\.w1 is torch\.float32, .*w1 needs one dtype for both"),
    ],
)  # fmt: skip
def test_every_key_is_accounted_for(change: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    tensors = _tensors()
    change(tensors)
    source = _write(tmp_path / "hf", tensors, CONFIG)
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "ours", "ours")
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "ours"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize(("tied", "what"), [(True, "unknown"), (False, "missing")])
def test_an_output_layer_that_config_json_denies_names_the_field(tied: bool, what: str, tmp_path: Path) -> None:
    tensors = _tensors()
    if not tied:
        del tensors["lm_head.weight"]
    source = _write(tmp_path / "hf", tensors, CONFIG | {"tie_word_embeddings": tied})
    with pytest.raises(CheckpointError, match=f"lm_head.weight: {what} key; tie_word_embeddings in config.json must"):
        convert(source, tmp_path / "ours", "ours")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama': must be one of mixtral, olmoe, qwen3_moe"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
    ],
)
def test_a_config_is_refused(changed: dict[str, Any], message: str, tmp_path: Path, capsys: Any) -> None:
    source = _write(tmp_path / "hf", _tensors(), {**CONFIG, **changed})
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "ours"]) == 2
    found = capsys.readouterr().err
    assert message in found and "config.json" in found and found.count("\n") == 1
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hf", "hf", "--to", "ours"], "hf: exists"),
        (["hf", "to", "--to", "hf"], "--to=hf: .* has this format already"),
        (["hf", "to", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["none", "to", "--to", "hf"], "none: no such folder"),
        (["hf", "to", "--to", "ours", "--like", "none"], "none/config.json: cannot be read"),
    ],
)
def test_bad_arguments(words: list[str], message: str, source: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(source.parent)
    with pytest.raises(ConfigError, match=message):
        if main(["convert", *words]) == 2:
            raise ConfigError(capsys.readouterr().err)


def test_a_config_without_sizes_is_one_line(source: Path, capsys: Any) -> None:
    path = source / "config.json"
    config = json.loads(path.read_text())
    for content, message in (
        ({**config, "num_local_experts": "four"}, "num_local_experts='four': must be an integer >= 1"),
        ({**config, "num_attention_heads": 0}, "num_attention_heads=0: must be an integer >= 1"),
        ({**config, "vocab_size": 9.5}, "vocab_size=9.5: must be an integer >= 1"),
        ({**config, **QWEN, "intermediate_size": "wide"}, "intermediate_size='wide': must be an integer >= 1"),
        ([1, 2], "damaged: holds no JSON object"),
        ({**config, "rope_theta": []}, "rope_theta=[]: must be a number > 0"),
    ):
        path.write_text(json.dumps(content))
        assert main(["convert", str(source), str(source.with_name("to")), "--to", "ours"]) == 2
        assert capsys.readouterr().err == f"megablocks convert: {path}: {message}\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_of_another_type_is_one_line_or_has_no_effect(family: str) -> None:
    """Each field in turn, also those within rope_parameters, is replaced by values of every type, and left out."""
    whole = {**CONFIGS[family], "model_type": family}
    within = [("rope_parameters", name) for name in whole.get("rope_parameters", ())]
    refused = 0
    for *parents, name in [*((name,) for name in whole), *within]:
        for value in (None, -1, 0, 1.5, "x", "", [], {}, True, [[1]], {"a": [1]}, 1e400, 10**400, 2**40, "left out"):
            config = json.loads(json.dumps(whole))
            inner = config[parents[0]] if parents else config
            inner[name] = value
            if value == "left out":
                del inner[name]
            try:
                model = model_of(config, "test")
                check_computable(config, "test")
                layout.layout_of(model, FAMILIES[family].rules)
            except ConfigError as error:
                refused += 1
                assert name in str(error) and "\n" not in str(error), (name, value)
    assert refused > 100


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("mixtral", {"rope_theta": "1e6"}, "rope_theta='1e6': must be a number > 0"),
        ("mixtral", {"rope_theta": None, "rope_scaling": "x"}, "rope_scaling='x': must be an object"),
        ("mixtral", {"rope_parameters": {"rope_theta": []}}, "rope_parameters.rope_theta=[]: must be a number > 0"),
        ("mixtral", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a number > 0"),
        ("mixtral", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true or false"),
        ("mixtral", {"model_type": ["mixtral"]}, "model_type=['mixtral']: must be one of mixtral, "),
        ("mixtral", {"vocab_size": 2**31}, "vocab_size=2147483648: must be at most 2147483647"),
        ("mixtral", {"num_hidden_layers": 10**9},
         "num_hidden_layers=1000000000: must be at most 1048576 divided by num_local_experts=3"),
        ("mixtral", {"num_experts_per_tok": 4}, "num_experts_per_tok=4: must be at most num_local_experts=3"),
        ("mixtral", {"num_attention_heads": 20},
         "num_attention_heads=20: must be at most hidden_size=8 where head_dim is missing"),
        ("mixtral", {"num_key_value_heads": 4}, "num_key_value_heads=4: must divide num_attention_heads=2"),
        ("mixtral", {"head_dim": 5}, "head_dim=5: must be even, because positions rotate it"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1: must be a list of the layers' numbers"),
        ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers=['0']: must be a list of the layers' numbers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0: must be an integer >= 1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1: must be an integer >= 0"),
        ("mixtral", {"hidden_act": 1}, "hidden_act=1: must be a string"),
        ("olmoe", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: must be left out; save the"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax': must be 'sigmoid', as transformers"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy': must be 'noaux_tc', as transformers"),
        ("deepseek_v3", {"n_group": 4}, "n_group=4: must divide n_routed_experts=6"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group=4: must be at most n_group=3"),
        ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": "1"}},
         "rope_parameters.mscale='1': must be a number >= 0"),
    ],
)  # fmt: skip
def test_an_unfit_field_is_named(family: str, changed: dict[str, Any], message: str) -> None:
    model_of({**CONFIGS[family], "model_type": family}, "test")
    with pytest.raises(ConfigError, match=f"^test: {re.escape(message)}"):
        model_of({**CONFIGS[family], "model_type": family, **changed}, "test")


def test_latent_attention_reads_no_groups_of_queries_and_no_width_of_a_head() -> None:
    config = {**CONFIGS["deepseek_v3"], "model_type": "deepseek_v3"}
    unread = {"num_key_value_heads": 3, "num_attention_heads": 20, "head_dim": None}
    found = model_of({**config, **unread}, "test")
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (20, 20, 6)


def test_a_link_to_nothing_is_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="ours: exists; choose another folder, or remove it"):
        convert(source, tmp_path / "ours", "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]


def test_a_folder_that_cannot_be_written_is_one_line(source: Path, capsys: Any) -> None:
    target = source / "config.json" / "ours"
    assert main(["convert", str(source), str(target), "--to", "ours"]) == 1
    found = capsys.readouterr().err
    assert found == f"megablocks convert: {target.with_name('.ours.partial')}: Not a directory\n"


def test_damaged_files_are_named(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    whole = path.read_bytes()
    for content, what in (
        (whole[:-1], "bytes, but its header describes"),
        (whole + b"\0", "bytes, but its header describes"),
        (whole[:100], "it ends within its header"),
        (struct.pack("<Q", 4) + b"{}}}", "no whole safetensors file"),
        (b"", "no whole safetensors file"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=what) as caught:
            convert(source, tmp_path / "ours", "ours")
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    size = struct.unpack("<Q", whole[:8])[0]
    for offsets, what in (
        ([-160, 0], "not all of them sizes"),
        ([0.0, 160.0], "not all of them sizes"),
        ([8, 168], "starts at byte 8, but the tensor before it ends at 0"),
        ([0, 168], "has 168 bytes, but another shape"),
    ):
        header = json.loads(whole[8 : 8 + size])
        header["model.embed_tokens.weight"]["data_offsets"] = offsets
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
        with pytest.raises(CheckpointError, match=what):
            convert(source, tmp_path / "ours", "ours")
    for damaged in (path, source / safetensors.INDEX, source / "config.json"):
        damaged.write_bytes((struct.pack("<Q", 99999) if damaged == path else b"") + b"[" * 99999)
        with pytest.raises((CheckpointError, ConfigError), match="recursion") as caught:
            convert(source, tmp_path / "ours", "ours")
        assert str(damaged) in str(caught.value)
        path.unlink(missing_ok=True)  # then the index counts
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / safetensors.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": None}}))
    with pytest.raises(CheckpointError, match="index.json: damaged"):
        convert(source, tmp_path / "ours", "ours")


def _interrupted(source: Path, target: Path, at: int, monkeypatch: Any, like: Path | None = None) -> Path:
    """Convert with a file a tensor until the unit number `at` is read. Returns the hidden folder."""
    read, count = layout.Units.read, 0

    def interrupted(self: Any, unit: str) -> Tensor:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return read(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr(layout.Units, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, "ours", like)
    assert not target.exists()
    (partial,) = target.parent.glob(".*")
    return partial


def _units_read(source: Path, target: Path, monkeypatch: Any) -> list[str]:
    """What a conversion reads of the source."""
    read, units = layout.Units.read, []

    def counted(self: Any, unit: str) -> Tensor:
        units.append(unit)
        return read(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr(layout.Units, "read", counted)
        convert(source, target, "ours")
    return units


def test_K10_an_interrupted_conversion_loads_nowhere_and_goes_on(
    source: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    convert(source, tmp_path / "whole", "ours")
    monkeypatch.setattr("megablocks.tool.convert.SHARD_BYTES", 1)  # a file for each tensor
    partial = _interrupted(source, tmp_path / "ours", 20, monkeypatch)
    with pytest.raises(ConfigError, match="neither config.json nor a checkpoint"):
        convert(partial, tmp_path / "to", "hf")
    files = sorted(partial.glob("*.safetensors"))
    damaged = files[0].read_bytes()
    files[0].write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))  # its size stays
    times = {path.name: path.stat().st_mtime_ns for path in files}

    units = _units_read(source, tmp_path / "ours", monkeypatch)
    assert units[0] == "model.embed_tokens.weight", "the damaged file is written anew"
    assert 1 < len(units) < 35 and "model.layers.0.input_layernorm.weight" not in units
    assert capsys.readouterr().err == "megablocks convert: continues where it was interrupted\n"
    kept = [name for name, time in times.items() if (tmp_path / "ours" / name).stat().st_mtime_ns == time]
    assert kept == [path.name for path in files[1:-1]], "but for the damaged file and the last, which was cut off"
    ours, whole = _read(tmp_path / "ours"), _read(tmp_path / "whole")
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], tensor) for name, tensor in whole.items())
    names = {path.name for path in (tmp_path / "ours").iterdir()} - {path.name for path in files}
    assert all(name.startswith("model") for name in names - {"config.json", "moe_config.json"}), names
    assert not list(tmp_path.glob(".*"))


def test_an_interrupted_conversion_of_other_files_starts_anew(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("megablocks.tool.convert.SHARD_BYTES", 1)
    _interrupted(source, tmp_path / "ours", 20, monkeypatch)
    changed = {name: tensor + 1 for name, tensor in _tensors().items()}
    (source / "model.safetensors").unlink()
    _write(tmp_path / "changed", changed, CONFIG).joinpath("model.safetensors").rename(source / "model.safetensors")
    assert len(_units_read(source, tmp_path / "ours", monkeypatch)) == 35
    assert torch.equal(_read(tmp_path / "ours")["model.norm.weight"], changed["model.norm.weight"])


def test_an_interrupted_conversion_with_another_like_is_refused(
    source: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Both folders have the same config.json. The first one's tokenizer must not travel with the second one's."""
    monkeypatch.setattr("megablocks.tool.convert.SHARD_BYTES", 1)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        (tmp_path / name / f"{name}.model").write_text(name)
    partial = _interrupted(source, tmp_path / "ours", 20, monkeypatch, tmp_path / "first")
    noted = {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    words = ["convert", str(source), str(tmp_path / "ours"), "--to", "ours"]
    for more, said in (([], "no --like"), (["--like", str(tmp_path / "second")], f"--like='{tmp_path / 'second'}'")):
        assert main([*words, *more]) == 2
        line = capsys.readouterr().err
        interrupted = f"the interrupted conversion into {tmp_path / 'ours'} copied "
        assert line.startswith(f"megablocks convert: {said}: {interrupted}")
        assert line.endswith(f"; give the same --like as then, or remove {partial}\n") and line.count("\n") == 1
    assert {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()} == noted
    (tmp_path / "first/first.model").write_text("changed since")
    with pytest.raises(ConfigError, match="other files beside the weights"):
        convert(source, tmp_path / "ours", "ours", tmp_path / "first")
    (partial / ".journal/work.json").write_text('"of an older package"')  # other work: it starts anew
    convert(source, tmp_path / "ours", "ours", tmp_path / "second")
    assert {path.name for path in (tmp_path / "ours").glob("*.model")} == {"second.model"}


@pytest.mark.parametrize("changed", ["megablocks.__version__", "megablocks.tool.convert.commit"])
def test_an_interrupted_conversion_of_another_package_starts_anew(
    changed: str, source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("megablocks.tool.convert.SHARD_BYTES", 1)
    _interrupted(source, tmp_path / "ours", 20, monkeypatch)
    monkeypatch.setattr(changed, (lambda: "another") if changed.endswith("commit") else "another")
    assert len(_units_read(source, tmp_path / "ours", monkeypatch)) == 35


def test_a_conversion_into_a_folder_in_work_is_refused(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("megablocks.tool.convert.SHARD_BYTES", 1)
    partial = _interrupted(source, tmp_path / "ours", 20, monkeypatch)
    with exclusive(partial, AssertionError()), pytest.raises(ConfigError, match="another process converts into it"):
        convert(source, tmp_path / "ours", "ours")
    next((partial / ".journal").glob("model*.json")).write_text("{")  # a damaged note
    convert(source, tmp_path / "ours", "ours")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "activation='gelu', not 'silu'"),
        ({"sliding_window": 4}, "sliding_window=4, not None"),
        ({"is_causal": False}, "is_causal=False, not True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear', not 'default'"),
    ],
)
def test_a_like_that_computes_otherwise_is_refused(
    changed: dict[str, Any], message: str, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps({**CONFIG, **changed}))
    with pytest.raises(ConfigError, match=f"like': describes another model: {message}"):
        convert(source, tmp_path / "ours", "ours", tmp_path / "like")


def test_a_like_of_another_dtype_leaves_the_dtype_of_the_weights(source: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float16"}))
    dtype = str(_tensors()["model.embed_tokens.weight"].dtype).removeprefix("torch.")
    convert(source, tmp_path / "ours", "ours", tmp_path / "like")
    convert(tmp_path / "ours", tmp_path / "again", "hf", tmp_path / "like")
    for folder in (tmp_path / "ours", tmp_path / "again"):  # transformers rounds the weights to what is here
        written = json.loads((folder / "config.json").read_text())
        assert written.get("dtype") == dtype and "torch_dtype" not in written


def test_scaled_positions_of_like_may_be_written_otherwise() -> None:
    config = {**CONFIGS["gpt_oss"], "model_type": "gpt_oss"}
    other = {**config, "rope_parameters": None, "rope_scaling": {**YARN, "truncate": False, "mscale": 1.0}}
    assert config_differences(config, other) == ""
    other["rope_scaling"]["beta_fast"] = 16
    assert config_differences(config, other) == "beta_fast=32, not 16"


def test_a_field_inside_rope_parameters_stands_for_no_other_field() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "attention_bias": False}
    config = {"model_type": "deepseek_v3", "max_position_embeddings": 4096, "attention_bias": True}
    with pytest.raises(ConfigError, match=r"attention_bias=True: must be False for Megatron"):
        check_computable({**config, "rope_parameters": rope}, "config.json")


def test_a_layer_that_computes_otherwise_than_config_json_is_refused(source: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    convert(source, ours, "ours")
    config = json.loads((ours / "moe_config.json").read_text())
    (ours / "moe_config.json").write_text(json.dumps({**config, "mlp_impl": "grouped", "init_std": 0.5}))
    convert(ours, tmp_path / "hf_of_ours", "hf")
    (ours / "moe_config.json").write_text(json.dumps({**config, "activation": "geglu"}))
    with pytest.raises(ConfigError, match="moe_config.json: activation='geglu': must be 'swiglu', as config.json says"):
        convert(ours, tmp_path / "hf_again", "hf")


def test_an_adapter_beside_the_weights_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="adapter_config.json: must be left out; transformers adds this adapter"):
        convert(source, tmp_path / "ours", "ours")


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "ours"]) == 0
    assert capsys.readouterr().out == "would convert mixtral from hf to ours: 35 tensors to 23, 0.00 GiB\n"
    monkeypatch.setenv("DRY_RUN", "yes")
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "ours"]) == 2
    assert capsys.readouterr().err == "megablocks convert: DRY_RUN='yes': must be 0 or 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_memory_is_bounded_by_the_largest_block(tmp_path: Path, monkeypatch: Any) -> None:
    config = {**CONFIG, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 1, "num_local_experts": 40}
    config["vocab_size"] = 256
    layout_ = layout.layout_of(model_of(config, "test"), FAMILIES["mixtral"].rules)
    source = _write(tmp_path / "hf", {name: torch.zeros(one.shape) for name, one in layout_.items()}, config)
    matrix, total = 64 * 256 * 4, (source / "model.safetensors").stat().st_size
    convert(source, tmp_path / "warm", "ours")
    tracemalloc.start()
    convert(source, tmp_path / "ours", "ours")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * matrix < total / 10, (peak, total)


def test_other_files_travel_but_no_code(source: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "modeling_evil.py", "pytorch_model.bin", "generation_config.json"):
        (source / name).write_text(name)
    for folder in ("additional_chat_templates", "original"):
        (source / folder).mkdir()
        (source / folder / "tool_use.jinja").write_text(folder)
    convert(source, tmp_path / "ours", "ours")
    names = {"config.json", "moe_config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    found = [path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*") if path.is_file()]
    assert {str(path) for path in found} == names | {"additional_chat_templates/tool_use.jinja"}
