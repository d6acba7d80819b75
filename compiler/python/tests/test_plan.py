"""Compiling, and what plans say."""

import json
import subprocess
import sys
from types import MappingProxyType

import pytest
from conftest import MODELS, command

import frit

VIEWS = ["units", "casts", "schedule", "memory", "kernels", "lints"]


def test_views_are_those_of_the_command_line(models):
    plan = models["gpt2"].compile(precision="bf16", ranks=2)
    for view in VIEWS:
        rows = getattr(plan, view)
        assert isinstance(rows, list) and all(isinstance(row, dict) for row in rows), view
        assert rows == json.loads(command("inspect", plan.path, "--view", view, "--json")), view
        assert rows, view
    assert plan.summary == json.loads(command("inspect", plan.path, "--json"))
    assert str(plan) == command("inspect", plan.path)
    assert "trains" in str(plan) and plan.ranks == 2 and plan.examples_per_step == 8
    assert [i["name"] for i in plan.inputs] == ["input_ids", "labels"]
    assert "[optimizer]" in plan.config and "gpt2" not in repr(plan.config)
    h100 = json.loads(command("simulate", plan.path, "--cluster", "h100", "--json"))
    assert plan.simulate("h100") == h100 and plan.simulate()["step_seconds"] > 0
    assert [p["tasks"] for p in plan.verify()["plans"]] == [len(plan.schedule), len(frit.load(plan.path + "/eval").schedule)]


def test_a_configuration_is_a_file_or_a_dict(mlp, tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('[optimizer]\nkind = "sgd"\nlr = 0.5\n[run]\nseed = 3\n')
    expected = mlp.compile(config=file, optimizer={"lr": 0.25}).config
    for config in (
        {"optimizer": {"kind": "sgd", "lr": 0.5}, "run": {"seed": 3}},
        {"optimizer.kind": "sgd", "optimizer.lr": 0.5, "seed": 3},
    ):
        assert mlp.compile(config=config, optimizer={"lr": 0.25}).config == expected
    with pytest.raises(frit.FritError) as refused:
        mlp.compile(config=["sgd"])
    assert refused.value.code == "E051" and "a dict" in refused.value.remedy
    with pytest.raises(frit.FritError, match="optimizer.kin"):
        mlp.compile(config={"optimizer": {"kin": "sgd"}})
    with pytest.warns(frit.FritWarning, match="W053.*optimizer.momentum"):
        mlp.compile(config={"optimizer": {"kind": "sgd", "momentum": 0.9}})


def test_what_a_module_freezes_stays_frozen(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    module[0].weight.requires_grad_(False)
    file = tmp_path / "train.toml"
    file.write_text('[params]\nfrozen = ["1.weight"]\n')

    def frozen(**options):
        plan = frit.compile(module, torch.zeros(2, 4), loss="mse", **options)
        return {row["parameter"] for row in plan.units if row["kind"] == "frozen"}

    assert frozen() == {"0.weight"}
    listed = ["1.weight"]
    for options in (
        {"config": file},
        {"config": {"params.frozen": listed}},
        {"config": {"params": {"frozen": listed}}},
        {"config": MappingProxyType({"params": MappingProxyType({"frozen": listed})})},
        {"params.frozen": listed},
        {"params": {"frozen": listed}},
    ):
        assert frozen(**options) == {"0.weight", "1.weight"}, options
    # An option still wins over the file.
    assert frozen(config=file, **{"params.frozen": ["2.weight"]}) == {"0.weight", "2.weight"}


def test_the_report_is_that_of_the_command_line(plan, tmp_path):
    plan.report(tmp_path / "own.html")
    command("report", plan.path, "-o", tmp_path / "theirs.html")
    page = (tmp_path / "theirs.html").read_text()
    assert (tmp_path / "own.html").read_text() == page
    assert "every rank computes the step of the model" in page
    plan.report(tmp_path / "quick.html", quick=True)
    assert "every rank computes" not in (tmp_path / "quick.html").read_text()
    screen = plan._plan.screen()
    sections = [part.partition("</section>")[0] for part in screen.split("<section")[1:]]
    assert [part for part in sections if part not in page] == [] and len(sections) == 2
    assert "Timeline" in screen and "Kernels" not in screen
    shown = plan._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count("<") == 2


def test_the_report_draws_runs(mlp, plan, tmp_path):
    metrics = tmp_path / "a.jsonl"
    with plan.trainer(metrics=metrics) as trainer:
        for batch in mlp.batches(3):
            trainer.step(batch)
    killed = tmp_path / "killed.jsonl"
    killed.write_text(metrics.read_text()[:-20])
    plan.report(tmp_path / "one.html", metrics=metrics)
    command("report", plan.path, "--metrics", metrics, "-o", tmp_path / "theirs.html")
    assert (tmp_path / "one.html").read_text() == (tmp_path / "theirs.html").read_text()
    with pytest.warns(frit.FritWarning, match="killed: the last line is incomplete"):
        plan.report(tmp_path / "two.html", metrics=[metrics, killed])
    assert "killed" in (tmp_path / "two.html").read_text()
    for options in ({"metrics": tmp_path / "none.jsonl"}, {"trace": tmp_path / "none.json"}):
        with pytest.raises(frit.FritError, match="none.json"):
            plan.report(tmp_path / "three.html", **options)
    assert not (tmp_path / "three.html").exists()


def test_plans_are_saved_loaded_and_compared(mlp, plan, tmp_path):
    plan.save(tmp_path / "a" / "plan")
    loaded = frit.load(tmp_path / "a" / "plan")
    assert str(loaded) == str(plan) and loaded.units == plan.units
    other = mlp.compile(precision="bf16")
    other.save(tmp_path / "a" / "plan")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["plan"]
    loaded = frit.load(tmp_path / "a" / "plan")
    found = plan.diff(loaded)
    assert found == plan.diff(other)
    assert {"key": "precision.compute", "a": '"f32"', "b": '"bf16"'} in found["config"] or found["config"]
    assert found["change"]["casts"] > 0 and plan.diff(plan)["change"] == {}
    (tmp_path / "link").symlink_to(tmp_path / "a" / "plan")
    plan.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and str(frit.load(tmp_path / "a" / "plan")) == str(plan)
    other.save(tmp_path / "link")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(frit.FritError, match="is not a plan") as refused:
        plan.save(tmp_path / "full")
    assert refused.value.code == "E090"
    weights = next((tmp_path / "a" / "plan").rglob("weights.safetensors"))
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(frit.FritError) as refused:
        loaded.verify()
    assert refused.value.code == "E094" and refused.value.remedy


def test_a_temporary_plan_goes_with_its_last_user(mlp):
    import gc
    import os

    plan = mlp.compile()
    path = plan.path
    trainer = plan.trainer()
    del plan
    gc.collect()
    assert os.path.isdir(path)
    trainer.step(next(mlp.batches(1)))
    del trainer
    gc.collect()
    assert not os.path.exists(path)


def linear(tmp_path, contracted=4, op="matmul"):
    model = {
        "frit_model": 1,
        "name": "m",
        "inputs": [{"name": "x", "dtype": "f32", "shape": ["batch", contracted]}],
        "dims": {"batch": None},
        "params": [{"name": "w", "shape": [4, 4], "init": "ones"}],
        "nodes": [{"op": op, "inputs": ["x", "w"], "outputs": ["y"], "id": "layer", "scope": "block"}],
        "outputs": ["y"],
    }
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model))
    return path


def test_options_are_the_keys_of_the_configuration(tmp_path):
    path = linear(tmp_path)
    (tmp_path / "train.toml").write_text(
        "[loss]\nkind = 'mse'\n[optimizer]\nlr = 0.5\nweight_decay = 0.25\n[precision]\ncompute = 'fp32'\n"
    )
    plan = frit.compile(
        path,
        config=tmp_path / "train.toml",
        bind={"batch": 4},
        optimizer={"kind": "sgd", "lr": 0.125, "group": [{"scope": "w", "lr": 0.75}]},
        schedule={"kind": "linear", "warmup_steps": 3, "total_steps": 9},
        accumulation=2,
        **{"data.shuffle": True, "params.trainable": ["w"]},
    )
    for line in (
        'kind = "mse"', 'kind = "sgd"', "lr = 0.125", "weight_decay = 0.25", "lr = 0.75", 'kind = "linear"',
        "warmup_steps = 3", "accumulation = 2", "shuffle = true", 'trainable = ["w"]',
    ):  # fmt: skip
        assert line in plan.config, line
    assert plan.examples_per_step == 8


def test_errors_have_a_code_a_place_and_a_remedy(tmp_path):
    path = linear(tmp_path)
    for options, code, said, remedy in [
        ({"optimizer": {"lrr": 1}}, "E052", "optimizer.lrr", "did you mean `optimizer.lr`?"),
        ({"ranks": 0}, "E051", "sharding.ranks", None),
        ({"precision": "int4"}, "E051", "precision.compute", None),
        ({"loss": object()}, "E051", "loss.kind", "give a text"),
        ({"bind": {}}, "E020", "batch", "--bind"),
        ({"config": tmp_path / "none.toml"}, "E050", "none.toml", "train.toml"),
    ]:
        with pytest.raises(frit.FritError, match=said) as refused:
            frit.compile(path, **{"loss": "mse", "bind": {"batch": 2}, **options})
        assert refused.value.code == code and refused.value.remedy, refused.value
        assert remedy is None or remedy in refused.value.remedy
        assert f"[{code}]" in str(refused.value)
    with pytest.raises(frit.FritError) as refused:
        frit.compile(linear(tmp_path, contracted=5), loss="mse", bind={"batch": 2})
    assert (refused.value.code, refused.value.scope) == ("E014", "block")
    assert refused.value.node == "layer" and refused.value.notes
    # Everything that is wrong at once.
    with pytest.raises(frit.FritError) as refused:
        frit.compile(path, loss="mse", bind={"batch": 2}, optimizer={"lrr": 1}, memory={"recomputes": 2})
    assert [d["code"] for d in refused.value.diagnostics] == ["E052", "E052"]
    for missing in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(frit.FritError) as refused:
            frit.compile(missing, loss="mse")
        assert refused.value.code == "E010"
    with pytest.raises(frit.FritError, match="plan.json") as refused:
        frit.load(tmp_path)
    assert refused.value.code == "E092"


def test_warnings_are_warned_of():
    with pytest.warns(frit.FritWarning, match=r"\[W061\]"):
        frit.compile(MODELS / "lost" / "round.onnx", loss="mse", bind={"batch": 4}, precision="fp32")


def test_the_programs_are_there():
    version = f"frit {frit.__version__}\n"
    assert command("--version") == version
    assert "error" in command("compile", "/no/such.onnx", code=2)
    run = [sys.executable, "-c", "from frit._programs import frit_run; frit_run()", "--version"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == f"frit-run {frit.__version__}\n"


def test_stubs_name_what_there_is():
    import ast
    import importlib.resources

    text = (importlib.resources.files(frit) / "__init__.pyi").read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name in ("Plan", "Trainer"):
            stubbed = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            real = {n for n in vars(getattr(frit, node.name)) if not n.startswith("_")}
            assert {n for n in stubbed if not n.startswith("_")} == real, node.name
            for name in real:
                assert vars(getattr(frit, node.name))[name].__doc__, name
    assert set(frit.__all__) <= set(dir(frit))
    assert frit.compile.__doc__ and frit.load.__doc__
