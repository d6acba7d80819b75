"""Plans: compiling, loading, and what they say."""

import html
import json
import os
import shutil
import tempfile
import weakref

from frit import _config, _export, _frit
from frit._errors import refuse, warn
from frit._trainer import Trainer


def compile(
    model,
    /,
    example_inputs=None,
    *,
    loss=None,
    precision=None,
    ranks=None,
    config=None,
    bind=None,
    output=None,
    **options,
):
    """Compiles a model into a plan: one training step of one rank.

    ``model`` is a torch module, or the path of an ``.onnx`` or ``.json`` model. A module is exported for training first,
    with the shapes of ``example_inputs`` (a tensor, a tuple of positional or a dict of named arguments), whose first
    axis is the batch of one rank in a micro-step. A step takes batch × ranks × accumulation examples. Of a structure that
    the module returns, the tensors are the outputs, by name: ``loss`` reads ``logits``, ``"output"`` takes ``loss``, and
    ``loss={"logits": NAME}`` names another.

    ``loss``, ``precision`` and ``ranks`` set ``loss.kind``, ``precision.compute`` and ``sharding.ranks``; ``optimizer``,
    ``schedule``, ``strategy``, ``accumulation``, ``seed`` and ``device`` are as short. Other options are sections of the
    configuration as dicts, such as ``optimizer={"kind": "adamw", "lr": 3e-4}``, or single keys, as in
    ``**{"memory.recompute": "all"}``. ``config`` is the path of a ``train.toml``, or a dict of such options; options win over it.
    ``frit compile --help-config`` lists all keys.

    ``bind`` gives the sizes of symbolic dimensions of a file, such as ``{"batch": 8}``. The plan directory is ``output``;
    by default a temporary one, which lives as long as the plan.

    Ctrl-C ends it. Findings are warned of as ``FritWarning``.

    Raises ``FritError`` with everything that is wrong with the model, the configuration or the environment.
    """
    holder = _Folder()
    module = model if _export.is_module(model) else None
    directory = os.fspath(output) if output is not None else os.path.join(holder.path, "plan")
    asked = {"loss": loss, "precision": precision, "ranks": ranks, **options}
    file, settings = _config.given(config)

    def compiled(path, given, outputs):
        wanted = settings.get("loss", settings.get("loss.kind")) if loss is None else loss
        if file is None and "loss" in outputs and wanted in ("output", {"kind": "output"}):
            given = {**given, "loss.logits": "loss"}
        # What the module freezes stays frozen beside what is listed, which may be in the file.
        own = {key: value for key, value in given.items() if key != "params.frozen"}
        sets, tables = _config.settings({**own, **settings})
        # Of several values of one key the last counts.
        more, rows = _config.settings(asked)
        written = (file, tables + rows, sets + more)
        return _frit.compile(path, directory, written, given.get("params.frozen", []), dict(bind or {}))

    given = ()
    if module is not None:
        exported = _export.Exported(module, example_inputs, holder.path)
        findings = exported.compiled(lambda file: compiled(file.path, file.options, file.outputs))
        given = exported.inputs
    elif example_inputs is not None:
        raise refuse("E097", "example_inputs are for torch modules", "leave them out for a model in a file")
    elif not isinstance(model, (str, os.PathLike)):
        raise refuse("E097", f"a {type(model).__name__} is no model", "give a torch module, or the path of a file")
    else:
        findings = compiled(os.fspath(model), {}, [])
    for found in findings:
        where = f" (at {found['scope'] or found['node']})" if found["scope"] or found["node"] else ""
        warn(f"[{found['code']}] {found['message']}{where}; {found['remedy']}", stacklevel=2)
    return Plan(directory, holder if output is None or module is not None else None, module, given)


def load(directory):
    """Loads a plan directory, which ``Plan.save`` or ``frit compile`` wrote.

    Raises ``FritError`` if there is none, or it is of another version.
    """
    return Plan(os.fspath(directory))


class _Folder:
    """A temporary directory that is removed with this object."""

    def __init__(self):
        self.path = tempfile.mkdtemp(prefix="frit-")
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class Rows(list):
    """A table: a list of dicts, which ``pandas.DataFrame`` takes and a notebook shows."""

    #: Rows that a notebook shows.
    SHOWN = 50

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return Rows(found) if isinstance(index, slice) else found

    def _repr_html_(self):
        columns = list(dict.fromkeys(key for row in self for key in row))

        def line(tag, values):
            return f"<tr>{''.join(f'<{tag}>{html.escape(str(v))}</{tag}>' for v in values)}</tr>"

        lines = [line("td", (row.get(c, "") for c in columns)) for row in self[: self.SHOWN]]
        more = f"<p>{len(self) - self.SHOWN} more rows</p>" if len(self) > self.SHOWN else ""
        return f"<table>{line('th', columns)}{''.join(lines)}</table>{more}"


class Plan:
    """One training step of one rank, as compiled: what is computed, exchanged and stored, and when."""

    def __init__(self, directory, holder=None, module=None, given=()):
        self._plan = _frit.Plan(directory)
        self._facts = json.loads(self._plan.facts())
        # The temporary directory lives as long as the plan.
        self._holder = holder
        #: The torch module that was compiled, or None.
        self.module = module
        # The names of what the module was given, in order.
        self._given = given

    def __repr__(self):
        return f"<frit.Plan {self.name!r} of {self.ranks} ranks at {self.path}>"

    def __str__(self):
        return self._plan.summary()

    def _repr_html_(self):
        """The first screen of the report, in a frame of its own."""
        page = html.escape(self._plan.screen(), quote=True)
        return f'<iframe srcdoc="{page}" style="width:100%;height:44rem;border:0"></iframe>'

    @property
    def path(self):
        """The plan directory."""
        return os.fspath(self._plan.path)

    @property
    def name(self):
        """The name of the model."""
        return self._facts["name"]

    @property
    def ranks(self):
        """The number of ranks."""
        return self._facts["ranks"]

    @property
    def batch(self):
        """Examples of one rank in a micro-step; 1 where the inputs have different first axes."""
        return self._facts["batch"]

    @property
    def examples_per_step(self):
        """Examples of a step: batch × ranks × accumulation."""
        return self.batch * self.ranks * self._facts["accumulation"]

    @property
    def config(self):
        """The configuration as resolved, as TOML."""
        return self._facts["config"]

    @property
    def inputs(self):
        """The inputs with the labels: name, dtype, shape (of one rank in a micro-step), per_example."""
        return self._facts["inputs"]

    @property
    def parameters(self):
        """The names of the parameters and buffers."""
        return self._facts["parameters"]

    @property
    def summary(self):
        """Sizes, counts and memory as a dict: bytes, FLOPs and seconds per rank and step."""
        return self._view("summary")

    @property
    def units(self):
        """The parameters: name, type, how they are held, unit, and the reason why they train or not."""
        return self._view("units")

    @property
    def casts(self):
        """Every conversion between float types."""
        return self._view("casts")

    @property
    def schedule(self):
        """The tasks in order, with streams, waits and predicted microseconds."""
        return self._view("schedule")

    @property
    def memory(self):
        """The buffers: name, arena, class, what one is for, offset and bytes."""
        return self._view("memory")

    @property
    def kernels(self):
        """The kernels: kind, uses in a step, operations, predicted microseconds, operands and launches."""
        return self._view("kernels")

    @property
    def lints(self):
        """The findings of the lints: id, severity, scope, message and remedy."""
        return self._view("lints")

    def _view(self, name):
        found = json.loads(self._plan.view(name))
        return Rows(found) if isinstance(found, list) else found

    def verify(self, quick=False):
        """Proves that the plan and its evaluation are sound, that the files beside them are the compiled ones, and what every pass kept.

        For the last of these the model is compiled again, unless ``quick``. Returns the verified ``plans`` with their numbers of tasks,
        and the ``certificate``: a verdict for every pass, and where outputs are rounded. Raises ``FritError`` that names the broken
        invariant, or what differs from what the model compiles to.
        """
        return json.loads(self._plan.verify(quick))

    def simulate(self, cluster=None):
        """Predicts a step on a cluster: ``"h100"`` and the like, or a TOML file; by default the plan's. Seconds, bytes."""
        return json.loads(self._plan.simulate(None if cluster is None else os.fspath(cluster)))

    def diff(self, other):
        """The differences to another plan, B minus A: numbers, configuration, casts, collectives, launches, lints."""
        if not isinstance(other, Plan):
            raise refuse("E097", f"a {type(other).__name__} is no plan", "read it with `frit.load(directory)` first")
        return json.loads(self._plan.diff(other._plan))

    def report(self, path="report.html", *, metrics=(), trace=None, quick=False):
        """Writes the report as one HTML page.

        ``metrics`` draws runs: a file that a trainer or ``frit run`` wrote as ``metrics``, or several, also of runs of other
        plans. ``trace`` draws a measured step: a file of ``frit run --trace``. Files that are used only in part are warned of
        as ``FritWarning``. The page has the certificate of ``verify``, or says why there is none; with ``quick`` it is left out.

        Raises ``FritError`` if a file cannot be read or written.
        """
        files = [metrics] if isinstance(metrics, (str, os.PathLike)) else metrics
        files = [os.fspath(file) for file in files]
        trace = None if trace is None else os.fspath(trace)
        for found in self._plan.report(os.fspath(path), files, trace, quick):
            warn(f"[{found['code']}] {found['message']}", stacklevel=2)

    def save(self, directory):
        """Copies the plan directory; an older plan there is replaced. A symbolic link is followed.

        Raises ``FritError`` if ``directory`` exists and is no plan.
        """
        target = os.path.realpath(os.fspath(directory))
        if os.path.realpath(self.path) == target:
            return
        if os.path.lexists(target) and not os.path.isfile(os.path.join(target, "plan.json")):
            raise refuse("E090", f"{target} exists and is not a plan", "choose another directory")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".frit-", dir=os.path.dirname(target)) as aside:
            new = os.path.join(aside, "new")
            shutil.copytree(self.path, new)
            if os.path.lexists(target):
                os.rename(target, os.path.join(aside, "old"))
            os.rename(new, target)

    def trainer(
        self,
        *,
        weights=None,
        checkpoint=None,
        checkpoint_every=None,
        keep=None,
        resume=False,
        metrics=None,
        threads=None,
        max_skipped=None,
        evaluation=True,
        **hyper,
    ):
        """Begins to train; on the CPU the ranks are threads of this process.

        ``weights`` are files of parameters to start from. Checkpoints are written into the directory ``checkpoint``
        every ``checkpoint_every`` steps and when the trainer is closed, of which the newest ``keep`` are kept; with
        ``resume`` the training goes on from the latest. ``metrics`` is a file for one JSON object per step. ``threads``
        are per rank; by default the cores divided by the ranks. After ``max_skipped`` skipped steps in a row (100) the
        run has failed. Without ``evaluation`` the trainer cannot evaluate, which saves the memory of that plan. Other
        arguments change hyper-parameters, as in ``optimizer={"lr": 3e-4}``.

        Raises ``FritError`` if the options do not fit the plan, or a checkpoint that of another model.
        """
        return Trainer(
            self,
            weights=weights,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            keep=keep,
            resume=resume,
            metrics=metrics,
            threads=threads,
            max_skipped=max_skipped,
            evaluation=evaluation,
            hyper=hyper,
        )
