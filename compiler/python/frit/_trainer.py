"""Trainers: a plan's steps on batches that the caller gives."""

import os
from collections.abc import Mapping

from frit import _arrays, _config, _export, _frit
from frit._errors import refuse, warn


class Trainer:
    """The training of a plan, made by ``Plan.trainer``; a context manager that closes it.

    One thread at a time may use it. While a step runs, other Python threads run too; they must not write to the batch.
    Ctrl-C takes effect after the step that runs: the state is that of whole steps.
    """

    def __init__(
        self,
        plan,
        *,
        weights,
        checkpoint,
        checkpoint_every,
        keep,
        resume,
        metrics,
        threads,
        max_skipped,
        evaluation,
        hyper,
    ):
        self.plan = plan
        without = [name for name, given in (
            ("checkpoint_every", checkpoint_every is not None),
            ("keep", keep is not None),
            ("resume", resume),
        ) if given and checkpoint is None]
        if without:
            raise refuse("E097", f"`{without[0]}` without `checkpoint`", "name the directory, checkpoint=\"...\"")
        if isinstance(weights, (str, os.PathLike)):
            weights = [weights]
        self._trainer = _frit.Trainer(
            plan.path,
            weights=[os.fspath(w) for w in weights or ()],
            checkpoint=None if checkpoint is None else os.fspath(checkpoint),
            every=checkpoint_every,
            keep=keep,
            resume=resume,
            metrics=None if metrics is None else os.fspath(metrics),
            threads=threads,
            hyper=_config.numbers_of(hyper),
            max_skipped=max_skipped,
            evaluation=evaluation,
        )
        self._warn(stacklevel=3)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<frit.Trainer of {self.plan.name!r} after {self.steps} steps>"

    @property
    def rank(self):
        """The rank of this process; 0 where ranks are threads."""
        return self._trainer.rank

    @property
    def steps(self):
        """Steps that were run, those of a resumed checkpoint included."""
        return self._trainer.steps

    def step(self, batch):
        """Runs one training step, and returns its metrics.

        ``batch`` has the inputs and the labels by name, or in the order of ``Plan.inputs``, or all inputs of the module in
        its order and then the labels: arrays of NumPy, tensors of torch, anything with DLPack or a buffer, or lists. Their
        first axis is ``Plan.examples_per_step``: rank by rank, and within a rank micro-step by micro-step. Where every rank
        is a process (torchrun), it is this rank's part.
        Contiguous tensors in the CPU's memory are not copied.

        The metrics: step, loss (mean over the batch, before the update), grad_norm (before clipping), lr, loss_scale,
        skipped, tokens_or_examples_per_s, step_seconds, memory_bytes (in use after the step; None where unknown).

        Raises ``FritError`` if the batch does not fit, which changes nothing, or if the run has failed to train (E106),
        after which no more steps are taken.
        """
        metrics = self._trainer.step(_arrays.arrays(batch, self.plan.inputs, self.plan._given))
        self._warn(stacklevel=2)
        return metrics

    def evaluate(self, batches):
        """Evaluates the current parameters over batches, of which each may have any number of examples.

        Returns loss, losses (name, weight, loss, count), metrics (those of ``[metrics]``), examples, batches (of the
        plan), examples_per_s: those of ``frit eval`` on the same examples.

        Raises ``FritError`` if a batch does not fit, or there is none.
        """
        self._trainer.begin_evaluation()
        inputs = self.plan.inputs + self.plan._facts["evaluation_inputs"]
        for batch in [batches] if isinstance(batches, Mapping) else batches:
            self._trainer.evaluate(_arrays.arrays(batch, inputs, self.plan._given))
        return self._trainer.evaluated()

    def state_dict(self, *, framework=None, average=False):
        """The parameters by name; with ``average`` their moving averages (``optimizer.ema``).

        ``framework`` is ``"numpy"`` or ``"torch"``; by default torch if a torch module was compiled. Then the dict is
        one for ``module.load_state_dict``, and adapters that the plan adds are beside it. On ranks other than 0 it is empty.
        """
        framework = framework or ("torch" if self.plan.module is not None else "numpy")
        if framework not in ("numpy", "torch"):
            raise ValueError(f"framework is 'numpy' or 'torch', not {framework!r}")
        found = {
            name: _arrays.restored(kind, shape, memory, framework)
            for name, (kind, shape, memory) in self._trainer.state_dict(average)
        }
        if framework == "torch" and self.plan.module is not None and found:
            trained = {row["parameter"] for row in self.plan.units if row["kind"] == "trainable"}
            return _export.torch_state(self.plan.module, found, trained)
        return found

    def load_state_dict(self, state):
        """Replaces all parameters, given by name; the optimizer keeps its state. Moving averages follow before the first
        step only.

        Raises ``FritError`` that lists all that are missing, unknown or of another type.
        """
        if self.plan.module is not None:
            known = set(self.plan.parameters)
            own = self.plan.module.state_dict()
            # Tied copies and buffers of the module that the plan does not have.
            state = {name: value for name, value in state.items() if name in known or name not in own}
        state = {name: _arrays.real(value) for name, value in state.items()}
        self._trainer.load_state_dict({name: _arrays.pair(value, name) for name, value in state.items()})

    def save(self, path, *, average=False):
        """Writes the parameters to a ``.safetensors`` file; with ``average`` their moving averages."""
        self._trainer.save(os.fspath(path), average)

    def save_adapter(self, folder, *, average=False):
        """Writes the adapter as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``.

        ``peft.PeftModel.from_pretrained`` loads the folder, and so does ``weights=`` of another trainer.

        Raises ``FritError`` if the plan was compiled without ``adapter=``.
        """
        self._trainer.save_adapter(os.fspath(folder), average)

    def export(self, path, *, average=False, training=False, external_data=False):
        """Writes the model with its trained parameters as ONNX, in inference mode unless ``training``.

        Adapters are merged into the weights beside which they were trained. Weights above 2 GiB, or all with
        ``external_data``, are in a file beside it. Findings are warned of as ``FritWarning``.

        Raises ``FritError`` if the plan was not compiled from ONNX, or a file cannot be written.
        """
        for found in self._trainer.export(os.fspath(path), average, training, external_data):
            warn(f"[{found['code']}] {found['message']}", stacklevel=2)

    def checkpoint(self):
        """Saves a checkpoint now, and waits until it is on disk. Without ``checkpoint=`` nothing happens."""
        self._trainer.checkpoint()
        self._warn(stacklevel=2)

    def close(self):
        """Ends the training, after a last checkpoint if there are checkpoints.

        Raises ``FritError`` if the state could not be saved.
        """
        self._trainer.close()

    def _warn(self, stacklevel):
        for text in self._trainer.take_warnings():
            warn(text, stacklevel + 1)
