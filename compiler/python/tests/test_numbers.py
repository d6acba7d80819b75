"""A trainer computes the numbers of the command line bit for bit, whatever the batches are made of."""

import array

import numpy as np
import pytest
from conftest import command, metrics_of, run

import frit
from frit import _arrays

STEPS = 6


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
@pytest.mark.parametrize(("ranks", "precision"), [(1, "fp32"), (2, "fp32"), (2, "bf16")])
def test_numbers_are_those_of_the_command_line(models, tmp_path, name, ranks, precision):
    model = models[name]
    # The reference normalizes by the batch of all ranks.
    norm = "sync" if name == "resnet" else "as_exported"
    command(
        "compile", model.path, "--bind", f"batch={model.batch // ranks}", "-o", tmp_path / "plan",
        *[x for s in (f"loss.kind={model.reference['loss']}", f"precision.compute={precision}",
                      f"sharding.ranks={ranks}", f"model.batch_norm={norm}") for x in ("--set", s)],
    )  # fmt: skip
    command(
        "run", tmp_path / "plan", "--data", model.data_path, "--steps", STEPS,
        "--metrics", tmp_path / "metrics.jsonl", "--save", tmp_path / "saved.safetensors",
    )  # fmt: skip
    options = {"ranks": ranks, "precision": precision, "model": {"batch_norm": norm}}
    plan = model.compile(**options, output=tmp_path / "own")
    compiled = (tmp_path / "plan" / "plan.json").read_bytes()
    assert (tmp_path / "own" / "plan.json").read_bytes() == compiled
    with plan.trainer() as trainer:
        found = [trainer.step(batch) for batch in model.batches(STEPS)]
        trainer.save(tmp_path / "own.safetensors")
    expected = metrics_of(tmp_path / "metrics.jsonl")
    assert len(expected) == STEPS
    for ours, theirs in zip(found, expected):
        for key in ("step", "loss", "grad_norm", "lr", "loss_scale", "skipped"):
            assert ours[key] == theirs[key], (key, ours, theirs)
        assert ours["step_seconds"] > 0 and ours["memory_bytes"] > 2**20
    saved = (tmp_path / "saved.safetensors").read_bytes()
    assert (tmp_path / "own.safetensors").read_bytes() == saved
    reference = model.reference[precision]["loss"][:STEPS]
    tolerance = 2e-5 if precision == "fp32" else 2e-2
    assert np.allclose([m["loss"] for m in found], reference, rtol=tolerance, atol=0)


class Dlpack:
    """A tensor of a library that speaks DLPack only."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def strided(x):
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]) if x.ndim > 1 else (2 * len(x),), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


FORMS = {
    "lists, as of a datasets iterator": lambda x: x.tolist(),
    "rows in a list": list,
    "buffers": lambda x: memoryview(np.ascontiguousarray(x)),
    "DLPack": lambda x: Dlpack(x.copy()),
    "not contiguous": strided,
    "Fortran order": lambda x: np.asfortranarray(x),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "narrow labels": lambda x: x.astype(np.uint8) if x.dtype.kind == "i" else x,
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_form_give_the_same_losses(mlp, plan, losses, form):
    batches = ({k: FORMS[form](x) for k, x in batch.items()} for batch in mlp.batches(8))
    assert run(plan, batches) == losses


class Dataset:
    """Rows as the library datasets keeps them: by index a dict, by a slice and of `iter` a dict of columns."""

    def __init__(self, columns, form):
        self.columns, self.form = columns, form

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: self.form(x[index]) for name, x in self.columns.items()}

    def iter(self, batch_size, drop_last_batch=False):
        for begin in range(0, len(self), batch_size):
            if begin + batch_size <= len(self) or not drop_last_batch:
                yield self[begin : begin + batch_size]


def lists(x):
    return x.tolist() if isinstance(x, np.ndarray) else x.item()


@pytest.mark.parametrize("form", [lists, np.asarray], ids=["python", "numpy"])
def test_a_datasets_iterator_gives_the_same_losses(mlp, plan, losses, form):
    dataset = Dataset({name: x[: 8 * mlp.batch + 3] for name, x in mlp.data.items()}, form)
    batches = dataset.iter(batch_size=plan.examples_per_step, drop_last_batch=True)
    assert run(plan, batches) == losses


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torch_gives_the_same_losses(mlp, plan, losses, torch, workers):
    dataset = Dataset({name: torch.tensor(x[: 8 * mlp.batch + 3]) for name, x in mlp.data.items()}, lambda x: x)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=plan.examples_per_step, drop_last=True, num_workers=workers
    )
    assert run(plan, loader) == losses
    dlpack = ({name: Dlpack(x) for name, x in batch.items()} for batch in loader)
    assert run(plan, dlpack) == losses


def test_tensors_of_torch_are_not_copied(torch):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool):
        x = torch.ones(4, 6, dtype=dtype)
        for given in (x, x[1:3], x.clone().requires_grad_() if dtype.is_floating_point else x):
            found, _ = _arrays.pair(given, "x")
            assert found.__array_interface__["data"][0] == given.data_ptr(), dtype
        if dtype is not torch.bfloat16:  # NumPy has no such type, and DLPack goes through NumPy.
            found, _ = _arrays.pair(Dlpack(x), "x")
            assert found.__array_interface__["data"][0] == x.data_ptr(), dtype


def test_sequences_are_in_the_order_of_the_inputs_and_other_names_are_not_read(mlp, plan, losses):
    names = [i["name"] for i in plan.inputs]
    assert run(plan, ([b[n] for n in names] for b in mlp.batches(8))) == losses
    assert run(plan, ({**b, "id": ["a", object()]} for b in mlp.batches(8))) == losses


def test_contiguous_tensors_are_not_copied(mlp):
    x = mlp.data["x"][3:5]
    for given in (x, memoryview(x), Dlpack(x.copy())):
        found, kind = _arrays.pair(given, "x")
        assert kind == "f32"
        memory = given.x if isinstance(given, Dlpack) else x
        assert np.shares_memory(found, memory), type(given)
    codes = array.array("B", [1, 2, 3])
    found, kind = _arrays.pair(codes, "codes")
    codes[0] = 9
    assert kind == "u8" and found[0] == 9


def test_threads_do_not_change_the_numbers(mlp, plan, losses):
    assert run(plan, mlp.batches(8), threads=1) == losses
    assert run(plan, mlp.batches(8), threads=3) == losses


def test_micro_steps_and_smaller_last_batches(mlp, tmp_path):
    half = mlp.batch // 2
    options = {"bind": {"batch": half}, "accumulation": 2, "data": {"drop_last": False}}
    model = {"loss": "cross_entropy", "precision": "fp32"}
    plan = frit.compile(mlp.path, **model, **options)
    assert plan.examples_per_step == mlp.batch
    whole = next(mlp.batches(1))
    with plan.trainer() as trainer:
        first = trainer.step(whole)["loss"]
        trainer.step({k: x[:half] for k, x in whole.items()})
        with pytest.raises(frit.FritError, match=f"a step takes {mlp.batch} .* multiples of {half}"):
            trainer.step({k: x[: half - 1] for k, x in whole.items()})
        assert trainer.steps == 2
    reference = mlp.reference["fp32"]["loss"][0]
    assert abs(first - reference) < 1e-5 * reference
