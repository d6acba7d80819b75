"""Low-rank adapters: the files of the command line byte for byte, and what is frozen."""

import json

import numpy as np
import pytest
from conftest import command, read_safetensors

import frit

STEPS = 4
ADAPTER = {"kind": "lora", "rank": 4, "alpha": 8.0, "targets": ["**.q_proj", "**.v_proj"]}


@pytest.fixture(params=[(1, "fp32", "adamw"), (2, "bf16", "sgd")], ids=lambda p: f"{p[0]} ranks, {p[1]}, {p[2]}")
def made(models, request, tmp_path):
    """A model, its plan with an adapter, and the options of both."""
    ranks, precision, optimizer = request.param
    model = models["llama"]
    options = {"ranks": ranks, "precision": precision, "optimizer": optimizer}
    return model, model.compile(**options, adapter=ADAPTER, output=tmp_path / "own"), options


def test_adapters_are_those_of_the_command_line(made, tmp_path):
    model, plan, options = made
    sets = {
        "loss.kind": model.reference["loss"], "precision.compute": options["precision"],
        "sharding.ranks": options["ranks"], "optimizer.kind": options["optimizer"],
        **{f"adapter.{key}": json.dumps(value) for key, value in ADAPTER.items()},
    }  # fmt: skip
    command(
        "compile", model.path, "--bind", f"batch={model.batch // options['ranks']}", "-o", tmp_path / "theirs",
        *[x for key, value in sets.items() for x in ("--set", f"{key}={value}")],
    )  # fmt: skip
    saved = tmp_path / "saved.safetensors"
    command("run", tmp_path / "theirs", "--data", model.data_path, "--steps", STEPS, "--save", saved)
    command(
        "export", tmp_path / "theirs", "--weights", saved, "--adapter", tmp_path / "adapter",
        "-o", tmp_path / "merged.onnx",
    )  # fmt: skip
    with plan.trainer() as trainer:
        for batch in model.batches(STEPS):
            trainer.step(batch)
        trainer.save_adapter(tmp_path / "own adapter")
        trainer.export(tmp_path / "own.onnx")
        evaluated = trainer.evaluate(model.batches(2))["loss"]
        state = trainer.state_dict()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "own adapter" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes(), name
    assert (tmp_path / "own.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()
    saved = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    matrices = {name: x for name, x in state.items() if ".lora_" in name}
    assert {f"base_model.model.{name}" for name in matrices} == set(saved) and len(saved) == 8
    assert all(np.array_equal(saved[f"base_model.model.{name}"], x) for name, x in matrices.items())
    # The folder is what a trainer starts from.
    with plan.trainer(weights=tmp_path / "adapter") as trainer:
        assert trainer.evaluate(model.batches(2))["loss"] == evaluated
        assert trainer.steps == 0
    with plan.trainer() as trainer:
        assert trainer.evaluate(model.batches(2))["loss"] != evaluated


def test_frozen_parameters_are_told(made):
    _, plan, _ = made
    kinds = {row["parameter"]: (row["kind"], row["reason"]) for row in plan.units}
    trained = {name for name, (kind, _) in kinds.items() if kind == "trainable"}
    assert trained and all(".lora_" in name for name in trained)
    frozen = {name for name, (kind, _) in kinds.items() if kind == "frozen"}
    assert frozen and not any(".lora_" in name for name in frozen)
    assert all(reason for _, reason in kinds.values())
    assert f"trains {len(trained)} of {len(plan.parameters)} parameters" in str(plan)


def test_checkpoints_hold_adapters(made, tmp_path):
    model, plan, _ = made
    with plan.trainer(checkpoint=tmp_path / "ckpt") as trainer:
        whole = [trainer.step(batch)["loss"] for batch in model.batches(STEPS)]
    with plan.trainer(checkpoint=tmp_path / "half") as trainer:
        half = [trainer.step(batch)["loss"] for batch in model.batches(STEPS // 2)]
    with plan.trainer(checkpoint=tmp_path / "half", resume=True) as trainer:
        rest = [trainer.step(batch)["loss"] for batch in model.batches(STEPS, start=STEPS // 2)]
    assert half + rest == whole


def test_a_plan_without_an_adapter_has_none_to_save(plan, tmp_path):
    with plan.trainer() as trainer:
        with pytest.raises(frit.FritError, match="without an adapter") as refused:
            trainer.save_adapter(tmp_path / "adapter")
        assert "adapter.kind" in refused.value.remedy
    assert not (tmp_path / "adapter").exists()
