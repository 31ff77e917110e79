"""transformers' Trainer with our experts: the losses of the model's own, and a run that was interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megablocks.hf

transformers = pytest.importorskip("transformers", minversion=megablocks.hf.OLDEST)
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

megablocks.hf.register()

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip


def _model(implementation: str) -> Any:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES))
    model.set_experts_implementation(implementation)
    return model


def _losses(model: Any, folder: Path, resume: Path | None = None, **options: Any) -> list[float]:
    """The loss of each of four steps, or of the rest of them. A checkpoint is written behind the second."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (32, 9), generator=draw)
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2, logging_steps=1, learning_rate=1e-2,
        report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": t, "labels": t} for t in tokens])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}])
def test_the_trainers_losses_equal_those_with_the_models_own_experts(options: Any, tmp_path: Path) -> None:
    options = {"optim": "sgd", **options}  # Adam's first steps turn a rounding of a small gradient into a whole step
    theirs, ours = (_losses(_model(name), tmp_path / name, **options) for name in ("eager", "megablocks"))
    assert len(ours) == 4 and len({round(loss, 4) for loss in ours}) > 1
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_run_resumes_from_a_model_that_was_loaded_from_its_checkpoint(tmp_path: Path) -> None:
    """The Trainer itself loads no experts of a family whose files have tensors of each expert (transformers#48805)."""
    whole = _losses(_model("megablocks"), tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="megablocks")
    assert _losses(model, tmp_path, checkpoint) == whole, "two steps of the first run, and two after it"
