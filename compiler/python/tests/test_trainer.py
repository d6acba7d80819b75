"""Trainers: evaluation, files, checkpoints, Ctrl-C, and what is refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import command, metrics_of, read_safetensors, run

import frit


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_is_that_of_the_command_line(mlp, tmp_path, ranks):
    plan = mlp.compile(ranks=ranks, output=tmp_path / "plan")
    with plan.trainer() as trainer:
        for batch in mlp.batches(4):
            trainer.step(batch)
        trainer.save(tmp_path / "saved.safetensors")
        # Batches as of training; and all examples but some in one.
        found = trainer.evaluate(mlp.batches())
        some = {k: x[:100] for k, x in mlp.data.items()}
        fewer = trainer.evaluate(some)
        # Training goes on from the same parameters.
        after = trainer.step(next(mlp.batches(5, start=4)))["loss"]
    weights = ["--weights", tmp_path / "saved.safetensors", "--json"]
    expected = json.loads(command("eval", plan.path, "--data", mlp.data_path, *weights))
    for key in ("loss", "losses", "metrics", "examples", "batches"):
        assert found[key] == expected[key], key
    assert "accuracy" in found["metrics"] and fewer["examples"] == 100
    assert fewer["loss"] != found["loss"]
    assert after == run(plan, mlp.batches(5))[-1]
    with plan.trainer() as trainer, pytest.raises(frit.FritError, match="no examples"):
        trainer.evaluate([])
    others = mlp.compile(ranks=ranks, output=tmp_path / "others", metrics={"report": ["accuracy(logits, others)"]})
    with others.trainer() as trainer:
        found = trainer.evaluate({**mlp.data, "others": mlp.data["labels"][::-1].copy()})
    assert 0.0 < found["metrics"]["accuracy"] != expected["metrics"]["accuracy"]
    options = {"evaluation": False}
    with plan.trainer(**options) as trainer, pytest.raises(frit.FritError, match="without the plan's evaluation"):
        trainer.evaluate(some)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_go_out_and_come_back(mlp, tmp_path, ranks):
    plan = mlp.compile(ranks=ranks, optimizer={"ema": 0.5})
    with plan.trainer() as trainer:
        for batch in mlp.batches(3):
            trainer.step(batch)
        trainer.save(tmp_path / "saved.safetensors")
        state, average = trainer.state_dict(), trainer.state_dict(average=True)
        evaluated = trainer.evaluate(mlp.batches(2))
    saved = read_safetensors(tmp_path / "saved.safetensors")
    assert list(state) == plan.parameters and set(saved) == set(state)
    for name, value in saved.items():
        assert value.dtype == state[name].dtype and np.array_equal(value, state[name]), name
    assert any((average[name] != state[name]).any() for name in state)
    with plan.trainer() as trainer:
        before = trainer.evaluate(mlp.batches(2))
        trainer.load_state_dict(state)
        assert trainer.evaluate(mlp.batches(2))["loss"] == evaluated["loss"] != before["loss"]
        # Before the first step the averages follow.
        for name, value in trainer.state_dict(average=True).items():
            assert np.array_equal(value, state[name])
        loaded = trainer.step(next(mlp.batches(4, start=3)))
    assert loaded["loss"] == run(plan, mlp.batches(4, start=3), weights=tmp_path / "saved.safetensors")[0]
    with plan.trainer() as trainer, pytest.raises(frit.FritError) as refused:
        wrong = {name: x for name, x in state.items() if not name.endswith("bias")}
        trainer.load_state_dict({**wrong, "fc1.weight": np.zeros(3, np.float32), "other": np.zeros(1)})
    for what in ("missing", "of another type", "unknown"):
        assert what in str(refused.value)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 1)])
def test_training_goes_on_from_a_checkpoint(mlp, losses, tmp_path, ranks):
    first, second = (mlp.compile(ranks=n) for n in ranks)
    folder = {"checkpoint": tmp_path / "ckpt", "metrics": tmp_path / "m.jsonl"}
    with first.trainer(**folder, checkpoint_every=2) as trainer:
        for batch in mlp.batches(3):
            trainer.step(batch)
        trainer.checkpoint()
        assert (tmp_path / "ckpt" / "latest").read_text().strip() == "step-00000003"
        trainer.step(next(mlp.batches(4, start=3)))
    steps = sorted(p.name for p in (tmp_path / "ckpt").glob("step-*"))
    assert steps == [f"step-{n:08}" for n in (2, 3, 4)]
    with pytest.raises(frit.FritError, match="earlier run"):
        first.trainer(**folder)
    with second.trainer(**folder, resume=True) as trainer:
        assert trainer.steps == 4
        rest = [trainer.step(batch)["loss"] for batch in mlp.batches(8, start=4)]
    assert [m["step"] for m in metrics_of(tmp_path / "m.jsonl")] == list(range(8))
    whole = run(first, mlp.batches(8))
    exact = ranks[0] == ranks[1]
    assert rest == whole[4:] if exact else np.allclose(rest, whole[4:], rtol=1e-5)
    index = json.loads((tmp_path / "ckpt" / "step-00000008" / "index.json").read_text())
    assert index["position"] == {"epoch": 0, "example": 8 * mlp.batch}
    # The command line goes on from it, with the next examples.
    second.save(tmp_path / "plan")
    command(
        "run", tmp_path / "plan", "--data", mlp.data_path, "--steps", 10, "--checkpoint", tmp_path / "ckpt",
        "--resume", "--metrics", tmp_path / "m.jsonl",
    )  # fmt: skip
    found = [m["loss"] for m in metrics_of(tmp_path / "m.jsonl")]
    assert found[4:8] == rest and len(found) == 10
    assert np.allclose(found, run(first, mlp.batches(10)), rtol=1e-5)


@pytest.mark.parametrize("first", ["trainer", "command line"])
def test_epochs_go_on_across_the_command_line_and_trainers(mlp, tmp_path, first):
    plan = mlp.compile(output=tmp_path / "plan")
    # Four steps and a half in an epoch: the rest of it is dropped.
    some = {name: x[: 4 * mlp.batch + 8] for name, x in mlp.data.items()}
    np.savez(tmp_path / "data.npz", **some)
    run = ["run", plan.path, "--data", tmp_path / "data.npz"]
    command(*run, "--steps", 15, "--metrics", tmp_path / "whole.jsonl")
    whole = [m["loss"] for m in metrics_of(tmp_path / "whole.jsonl")]
    folder = {"checkpoint": tmp_path / "ckpt", "metrics": tmp_path / "m.jsonl"}
    theirs = ["--checkpoint", folder["checkpoint"], "--metrics", folder["metrics"], "--resume"]

    def steps(begin, end):
        with plan.trainer(**folder, resume=begin > 0) as trainer:
            assert trainer.steps == begin
            for step in range(begin, end):
                trainer.step({name: x[step % 4 * mlp.batch :][: mlp.batch] for name, x in some.items()})

    def commanded(begin, end):
        command(*run, *theirs, "--steps", end)

    turns = [steps, commanded] if first == "trainer" else [commanded, steps]
    # Each ends within a later epoch than the first.
    for turn, (begin, end) in enumerate([(0, 6), (6, 9), (9, 13), (13, 15)]):
        turns[turn % 2](begin, end)
    assert [m["loss"] for m in metrics_of(folder["metrics"])] == whole


def interrupt_soon(seconds):
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def test_an_interrupt_ends_between_steps(mlp, plan, losses, tmp_path):
    found, batches = [], mlp.batches(8)
    with plan.trainer(checkpoint=tmp_path / "ckpt") as trainer:
        with pytest.raises(KeyboardInterrupt):
            timer = interrupt_soon(0.2)
            while True:
                # The loss of the step that was interrupted is lost, but not the step.
                trainer.step(next(mlp.batches(1)))
        timer.join()
        done = trainer.steps
        assert done > 0
        again = trainer.step(next(mlp.batches(1)))
        assert again["step"] == done
    assert (tmp_path / "ckpt" / "latest").read_text().strip() == f"step-{done + 1:08}"
    with plan.trainer() as trainer:
        found = [trainer.step(batch)["loss"] for batch in batches]
    assert found == losses


def test_an_interrupt_ends_a_compilation_and_the_lock_is_free_meanwhile(models, tmp_path):
    counted, stop = [0], threading.Event()

    def count():
        while not stop.wait(0.001):
            counted[0] += 1

    def interrupt():
        # Python ignores one that comes while it runs a finalizer, such as that of a folder.
        while not stop.wait(0.3):
            os.kill(os.getpid(), signal.SIGINT)

    threads = [threading.Thread(target=target) for target in (count, interrupt)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        try:
            for _ in range(100):
                models["gpt2"].compile(output=tmp_path / "plan")
        finally:
            stop.set()
    seconds = time.monotonic() - began
    for thread in threads:
        thread.join()
    assert counted[0] > 20 and seconds < 10
    assert not (tmp_path / "plan").exists() or frit.load(tmp_path / "plan").verify()


def test_what_does_not_fit_is_refused_and_changes_nothing(mlp, plan, losses):
    batch = next(mlp.batches(1))
    x, labels = batch["x"], batch["labels"]
    with plan.trainer() as trainer:
        for wrong, said in [
            ({"x": x}, "no tensor `labels`; the plan expects i64.* found `x` f32"),
            ({"x": x, "target": labels}, "`target` which no input reads"),
            ({"x": x[:4], "labels": labels[:4]}, f"4 examples; a step takes {mlp.batch}"),
            ({"x": x[:4], "labels": labels}, "has 16 examples, and `x` has 4"),
            ({"x": x[:, :10], "labels": labels}, "has shape"),
            ({"x": x.astype(np.float64), "labels": labels}, "is f64, and this input takes f32"),
            ({"x": x.astype(np.complex64), "labels": labels}, "complex64"),
            ({"x": x, "labels": labels + 10}, "outside of 0..=9"),
            ([x], "the plan reads"),
            (3, "the batch is a int"),
            ({"x": [[1.0], [1.0, 2.0]], "labels": labels}, "no tensor"),
        ]:
            with pytest.raises(frit.FritError, match=said) as refused:
                trainer.step(wrong)
            assert refused.value.code == "E100" and refused.value.remedy, said
        assert trainer.steps == 0
        assert [trainer.step(b)["loss"] for b in mlp.batches(8)] == losses
    with pytest.raises(frit.FritError, match="the trainer has ended: it was closed"):
        trainer.step(batch)
    trainer.close()


def test_a_run_that_fails_to_train_takes_no_more_steps(mlp, plan, tmp_path):
    options = {"optimizer": {"lr": 1e30}, "max_skipped": 3, "checkpoint": tmp_path / "ckpt"}
    with plan.trainer(**options) as trainer:
        with pytest.raises(frit.FritError) as failed:
            for batch in mlp.batches():
                trainer.step(batch)
        assert failed.value.code == "E106" and "optimizer.lr" in failed.value.remedy
        with pytest.raises(frit.FritError, match="has ended: the last 3 steps"):
            trainer.step(batch)
    assert not (tmp_path / "ckpt" / "latest").exists()


def test_hyper_parameters_can_be_changed_and_others_not(mlp, plan):
    with plan.trainer(optimizer={"lr": 5e-3}) as trainer:
        assert trainer.step(next(mlp.batches(1)))["lr"] == np.float32(5e-3)
    for wrong, said in [
        ({"optimizer": {"lrr": 1.0}}, "did you mean `optimizer.lr`"),
        ({"optimizer": {"kind": "adam"}}, "only numbers"),
        ({"precision": {"growth_interval": 3}}, "compile it again"),
        ({"weights": "/no/such/file"}, "No such file"),
    ]:
        with pytest.raises(frit.FritError, match=said):
            plan.trainer(**wrong)


def test_trainers_of_several_threads_do_not_disturb_each_other(mlp, plan, losses):
    found = {}

    def train(name):
        found[name] = run(plan, mlp.batches(8))

    threads = [threading.Thread(target=train, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(found[i] == losses for i in range(3))


def test_a_trainer_that_is_dropped_ends(mlp, plan):
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    trainer = plan.trainer()
    trainer.step(next(mlp.batches(1)))
    assert len(os.listdir("/proc/self/task")) > before[1]
    del trainer
    assert threading.active_count() == before[0] and len(os.listdir("/proc/self/task")) <= before[1]


SCRIPT = """
import json, os, sys
import frit
from conftest import Model

rank, steps = int(os.environ["RANK"]), 4
model = Model("mlp")
half = model.batch // 2
plan = frit.load(sys.argv[1])
own = lambda b: {k: x[rank * half : (rank + 1) * half] for k, x in b.items()}
with plan.trainer() as trainer:
    losses = [trainer.step(own(b))["loss"] for b in model.batches(steps)]
    assert trainer.rank == rank
    state = trainer.state_dict()
    evaluated = trainer.evaluate(own(b) for b in model.batches(3))
    trainer.save(sys.argv[2])
print(json.dumps([losses, len(state), evaluated["loss"]]))
"""


def test_ranks_that_are_processes_feed_their_own_parts(mlp, tmp_path):
    plan = mlp.compile(ranks=2, output=tmp_path / "plan")
    with plan.trainer() as trainer:
        losses = [trainer.step(batch)["loss"] for batch in mlp.batches(4)]
        evaluated = trainer.evaluate(mlp.batches(3))["loss"]
        trainer.save(tmp_path / "threads.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    saved = tmp_path / "processes.safetensors"
    call = [sys.executable, "-c", SCRIPT, plan.path, str(saved)]
    started = [
        subprocess.Popen(call, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE) for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert [f[0] for f in found] == [losses, losses]
    # Only rank 0 has the parameters.
    assert [f[1] for f in found] == [len(plan.parameters), 0]
    assert [f[2] for f in found] == [evaluated, evaluated]
    assert saved.read_bytes() == (tmp_path / "threads.safetensors").read_bytes()


@pytest.mark.parametrize("options", [{"checkpoint_every": 1}, {"resume": True}, {"keep": 2}])
def test_options_of_checkpoints_need_their_directory(mlp, options):
    plan = mlp.compile()
    with pytest.raises(frit.FritError, match=f"`{next(iter(options))}` without `checkpoint`") as error:
        plan.trainer(**options)
    assert error.value.code == "E097"


def test_what_is_no_plan_and_no_model_is_refused(mlp):
    with pytest.raises(frit.FritError, match="a str is no plan"):
        mlp.compile().diff("plan")
    with pytest.raises(frit.FritError, match="a NoneType is no model"):
        frit.compile(None)
