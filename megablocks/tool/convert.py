"""`convert FROM TO --to FORMAT`: a model between Hugging Face, our layers and Megatron, bit for bit.

    python -m megablocks convert models/OLMoE-1B-7B runs/olmoe --to megatron
    python -m megablocks convert runs/dmoe/checkpoints models/mine --to hf

FROM is a folder of safetensors files with config.json, or a run's checkpoints (the newest complete one is used), or
one checkpoint of them. Its format is detected. Formats:

  hf        a folder for transformers' AutoModelForCausalLM
  ours      as hf, but each layer's experts have the names of dMoE's state dict; moe_config.json is dMoE's config
  megatron  a folder for the driver's --load, which starts at iteration 0; flags.txt contains the model's flags

No value is computed or rounded, so a conversion there and back returns the same bytes. Tensors are read and written
one by one. Every key of FROM must be known, and all keys must be present. TO must not exist. The output is renamed to
TO at the end, so an interrupted conversion leaves nothing that loads. The same command then continues after the files
that are complete. DRY_RUN=1 checks keys, shapes and sizes and writes nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import megablocks
from megablocks.checkpoint import atomic
from megablocks.checkpoint.atomic import CheckpointError
from megablocks.checkpoint.families import (
    FAMILIES,
    OURS,
    check_computable,
    config_differences,
    config_of,
    differences,
    family_for,
    family_of,
    layer_config,
    model_of,
)
from megablocks.checkpoint.journal import Journal, begun
from megablocks.checkpoint.layout import Rule, Source, Stored, Units, check_names, layout_of
from megablocks.checkpoint.safetensors import SHARD_BYTES, NewTensor, SafetensorsFolder, write_folder
from megablocks.config import ConfigError, MoEConfig, is_dry_run
from megablocks.files import exclusive, sync
from megablocks.monitor.env_report import commit
from megablocks.tool.commands import Parser, need_megatron, unfit

FORMATS = ("hf", "ours", "megatron")
CONFIG, LAYER_CONFIG = "config.json", "moe_config.json"
_TEMPLATES = "additional_chat_templates"
"""The only subfolder that transformers' tokenizers read."""
_SECONDS_BETWEEN_LINES = 10.0
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Keys of old files; their values follow from config.json."""
_COMPUTES = (
    "top_k", "activation", "gelu_approximate", "mlp_bias", "output_bias", "shared_expert_gate", "router_type",
    "score_function", "softmax_order", "normalize_top_k", "top_k_scaling", "num_groups", "group_top_k",
    "expert_score_bias", "uniform_assignment",
)  # fmt: skip
"""Fields of `MoEConfig` that change the result of a layer with given weights that drops no token."""


class Progress:
    """Print a line on stderr every ten seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.skipped = total, 0, 0
        self._started = self._said = time.monotonic()

    def skip(self, size: int) -> None:
        """Count the bytes of a file that an interrupted conversion has left complete."""
        if not self.skipped:
            print("megablocks convert: continues where it was interrupted", file=sys.stderr, flush=True)
        self.skipped += size
        self.add(size)

    def add(self, size: int) -> None:
        self.done += size
        now = time.monotonic()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            speed = max(self.done - self.skipped, 1) / (now - self._started)
            rest = (self.total - self.done) / speed
            print(
                f"megablocks convert: {self.done / 2**30:.1f} of {self.total / 2**30:.1f} GiB, "
                f"{speed / 2**20:.0f} MiB/s, {rest:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


class Opened:
    """The model to convert.

    format: its format. model: its sizes. family: the entry of `FAMILIES`. config: its config.json; a run has none, so
    it is made from the run's flags. layout: where its tensors are stored. weights: their folder. folder: contains the
    files that are copied with the weights.
    """

    def __init__(self, folder: Path, like: Path | None) -> None:
        self.folder: Path | None = None
        self.weights = folder
        source: Source
        if (folder / CONFIG).is_file():
            if (adapter := folder / "adapter_config.json").is_file():
                fix = "must be left out; transformers adds this adapter to the weights, so merge it first"
                raise ConfigError(f"{adapter}: {fix} (merge_and_unload)")
            self.config = _read_config(folder / CONFIG)
            self.family, self.model = family_of(self.config, folder / CONFIG), model_of(self.config, folder / CONFIG)
            files, self.folder = SafetensorsFolder(folder), folder
            self.format = "ours" if any(name.endswith(".mlp.experts.w1") for name in files.shapes()) else "hf"
            source, rules = files, OURS if self.format == "ours" else FAMILIES[self.family].rules
            if self.format == "ours" and (folder / LAYER_CONFIG).is_file():
                _check_layer_config(folder / LAYER_CONFIG, layer_config(self.model))
        else:
            source, rules = self._open_run(folder)
        if like is not None:
            self._take_config(like)
        self.layout = layout_of(self.model, rules)
        check_names(source, self.layout, str(folder), lambda name: _DERIVED.search(name) is not None)
        self.units = Units(self.model, source, self.layout)
        if self.format == "megatron" or like is not None:  # transformers would round to the dtype of --like
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = str(self.units.dtype("model.embed_tokens.weight")).removeprefix("torch.")

    def _open_run(self, folder: Path) -> tuple[Source, tuple[Rule, ...]]:
        """Open a run's checkpoint. Returns its tensors and its format's rules; sets format, model, family, config."""
        marks = (folder / ".metadata", folder / atomic.POINTER)
        if not any(mark.exists() for mark in marks) and not atomic.iterations(folder):
            wanted = "a folder of safetensors files or a run's checkpoints"
            raise unfit(folder, f"{CONFIG} nor a checkpoint", wanted)
        need_megatron()
        from megablocks.megatron import conversion

        chosen, found = conversion.choose_checkpoint(folder)
        for warning in found:
            print(f"megablocks convert: warning: {warning}", file=sys.stderr)
        self.weights, checkpoint = chosen, conversion.Checkpoint(chosen)
        self.format, self.model = "megatron", conversion.model_of(checkpoint.args, chosen)
        self.family = family_for(self.model)
        self.config = config_of(self.model, self.family)
        return checkpoint, conversion.rules_of(self.model, checkpoint.per_layer)

    def _take_config(self, like: Path) -> None:
        """Use config.json and its family from --like, if it describes the same model."""
        config = _read_config(like / CONFIG)
        model = model_of(config, like / CONFIG)
        if changed := differences(model, self.model) or config_differences(config, self.config):
            raise ConfigError(f"--like={str(like)!r}: describes another model: {changed}")
        self.config, self.family, self.folder = config, family_of(config, like), like

    def identity(self, to: str) -> dict[str, str]:
        """Return texts on which the written files depend: "beside": what `--like` can replace, "weights": the rest."""
        package = [megablocks.__version__, commit()]
        files = _states(path for path in self.weights.iterdir() if path.is_file())
        beside = [str(self.folder.resolve()), _states(_others(self.folder))] if self.folder is not None else []
        return {
            "weights": json.dumps([package, str(self.weights.resolve()), files, to]),
            "beside": json.dumps([beside, self.config]),
        }


def _states(paths: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of files, to detect that a file was replaced."""
    return sorted((path.name, (state := path.stat()).st_size, state.st_mtime_ns) for path in paths)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: damaged: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: damaged: holds no JSON object")
    return found


def _check_layer_config(path: Path, expected: MoEConfig) -> None:
    """Raise ConfigError if moe_config.json describes a different computation than config.json."""
    found = _read_config(path)
    for name in _COMPUTES:
        value, wanted = found.get(name, getattr(expected, name)), getattr(expected, name)
        if value != wanted:
            raise ConfigError(f"{path}: {name}={value!r}: must be {wanted!r}, as {CONFIG} says; change one of them")


def _others(folder: Path) -> Iterator[Path]:
    """Yield the tokenizer and other files next to the weights, except code and other weights."""
    for path in sorted((*folder.iterdir(), *(folder / _TEMPLATES).glob("*"))):
        weights = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.suffix != ".py" and path.name not in (CONFIG, LAYER_CONFIG):
            yield path


def _write_files(opened: Opened, layout: Mapping[str, Stored], journal: Journal, to: str, progress: Progress) -> None:
    """Write the folder of format hf or ours."""
    target = journal.folder

    def tensor(stored: Stored) -> NewTensor:
        def blocks() -> Any:
            for block in stored.blocks:
                values = opened.units.block(stored, block)
                yield values
                progress.add(values.nbytes)

        return NewTensor(stored.name, opened.units.dtype_of(stored), stored.shape, blocks)

    write_folder(journal, [tensor(stored) for stored in layout.values()], SHARD_BYTES, progress.skip)
    (target / CONFIG).write_text(json.dumps(opened.config, indent=2) + "\n", encoding="utf-8")
    if to == "ours":
        content = json.dumps(layer_config(opened.model).to_dict(), indent=2)
        (target / LAYER_CONFIG).write_text(content + "\n", encoding="utf-8")
    if (folder := opened.folder) is not None:
        for path in _others(folder):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)


def convert(source: Path, target: Path, to: str, like: Path | None = None, dry_run: bool = False) -> str:
    """Convert a model. Returns a line that says what was done.

    Raises:
        ConfigError: a folder, a family or a setting that cannot be converted.
        CheckpointError: a file of `source` is damaged, or has missing or unknown keys.
    """
    if target.exists() or target.is_symlink():  # a rename onto a broken link would fail after all the work
        raise ConfigError(f"{target}: exists; choose another folder, or remove it")
    opened = Opened(source, like)
    if opened.format == to:
        raise ConfigError(f"--to={to}: {source} has this format already; choose another one")
    model = opened.model
    if to == "ours" and model.clamp is not None:
        raise ConfigError(f"--to=ours: {source} has a clamped gate and a router's bias, which dMoE lacks; use megatron")
    if to == "megatron":
        need_megatron()
        check_computable(opened.config, source / CONFIG)
        from megablocks.megatron import conversion

        conversion.flags_of(model)
        rules = conversion.rules_of(model, per_layer=bool(model.dense_layers))
    elif to == "ours":
        layer_config(model)  # refuses what no layer accepts
        rules = OURS
    else:
        rules = FAMILIES[opened.family].rules
    layout = layout_of(model, rules)
    total = sum(opened.units.dtype_of(stored).itemsize * math.prod(stored.shape) for stored in layout.values())
    what = f"{opened.family} from {opened.format} to {to}: {len(opened.layout)} tensors to {len(layout)}, "
    what += f"{total / 2**30:.2f} GiB"
    if dry_run:
        return f"would convert {what}"
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    with exclusive(partial, ConfigError(f"{target}: another process converts into it; wait until it ends")):
        identity, before = opened.identity(to), begun(partial)
        if identity["weights"] == before.get("weights") and identity["beside"] != before.get("beside"):
            given = "no --like" if like is None else f"--like={str(like)!r}"
            raise ConfigError(
                f"{given}: the interrupted conversion into {target} copied other files beside the weights; "
                f"give the same --like as then, or remove {partial}"
            )
        journal, progress = Journal(partial, identity), Progress(total)
        if to == "megatron":
            conversion.write(journal, opened.units, layout, progress.add, progress.skip)
        else:
            _write_files(opened, layout, journal, to, progress)
        for path in (*partial.rglob("*"), partial):
            sync(path)
        journal.close()
        os.rename(partial, target)
    sync(target.parent)
    return f"converted {what}"


def main(argv: Sequence[str]) -> int:
    parser = Parser("convert", description=__doc__)
    parser.add_argument("source", metavar="FROM", type=Path)
    parser.add_argument("target", metavar="TO", type=Path)
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format of TO")
    parser.add_argument("--like", type=Path, metavar="FOLDER",
                        help="take config.json and tokenizer from this folder; its model must be FROM's")  # fmt: skip
    options = parser.parse_args(argv)
    dry_run = is_dry_run()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron warns about packages that a conversion does not need
            done = convert(options.source, options.target, options.to, options.like, dry_run)
    except CheckpointError as error:
        print(f"megablocks convert: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk, a folder that cannot be written
        if error.errno is None:  # not from the system
            raise
        print(f"megablocks convert: {error.filename or options.target}: {error.strerror}", file=sys.stderr)
        return 1
    print(done)
    return 0
