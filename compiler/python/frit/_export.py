"""Exports torch modules for training, as docs/exporting.md teaches."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from unittest.mock import patch

from frit import _conditions
from frit._autograd import Functions
from frit._errors import FritError, refuse, warn
from frit._program import traced
from frit._translations import translations

#: Parameters of more bytes are stored beside the model: the file format holds 2 GiB.
LARGEST = 1 << 30
#: Where the exporter states what each input of a graph is.
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
#: Codes of what an importer refuses for its operators.
OPERATORS = {"E010", "E014", "E031", "E034"}
#: Characters of torch's reasons that are shown.
LONGEST = 240


def is_module(model):
    """Whether it is a torch module; torch is not imported for that."""
    return any(
        c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in type(model).__mro__
    )


class Exported:
    """A module as a file: ONNX, or torch's own archive where there is no ONNX form of it."""

    def __init__(self, module, example_inputs, folder):
        #: The file.
        self.path = None
        #: What the file cannot carry, as options: what is frozen, and that BatchNorm normalizes by its batch.
        self.options = {}
        #: The names of the outputs, if they have names.
        self.outputs = []
        #: The names of its inputs in the order in which `forward` takes them, also of those that it does not read.
        self.inputs = []
        #: Why there is no ONNX file, or why it was refused.
        self.refused = None
        self._folder, self._module, self._program = folder, module, None
        #: The program of an archive without writes in place.
        self._functional = None
        self._export(module, example_inputs)

    def _export(self, module, example_inputs):
        """Writes a module in training mode and with the names of its parameters.

        The shapes are those of the example inputs. Of a structure that the module returns, the tensors at its top are
        the outputs, by their names.
        """
        import torch

        if example_inputs is None:
            remedy = "give example_inputs: a tensor, a tuple, or a dict"
            raise refuse("E097", "a torch module needs example inputs", remedy)
        args, kwargs = _arguments(example_inputs)
        _refuse_parts(module)
        functions = Functions(torch)
        # What the caller handles is no cause of what happens here.
        handled = sys.exc_info()[1]
        with _training(module), _flat(module) as self.outputs, _quiet(), _plain_attention():
            norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
            batch_norms = {m.training and m.track_running_stats for m in norms}
            try:
                with functions.called():
                    self._program = traced(torch, module, args, kwargs)
            except Exception as error:
                if functions.refused or isinstance(error, FritError):
                    raise functions.refused or error from error.__cause__
                message = f"torch cannot export the module: {_reason(torch, error)}"
                raise refuse("E010", message, _remedy(message)) from error
            self.inputs = _inputs(torch, self._program)
            try:
                if len(batch_norms) > 1:
                    message = "some batch normalizations of the module train and others do not"
                    raise refuse("E053", message, "let all of them train, or none")
                self._write_onnx(torch, functions)
            except ImportError as error:
                raise refuse("E010", f"torch cannot export: {error}", "pip install onnx onnxscript") from error
            except Exception as error:
                own = functions.refused or _own(error, handled)
                if own is not None and own.code != "E053":
                    raise own from None
                if own is None:
                    message = f"torch cannot write the module as ONNX: {_reason(torch, error)}"
                    own = refuse("E010", message, _remedy(message))
                    own.__cause__ = error
                # An archive has the forward of a function only.
                if functions.by_key:
                    raise own
                self._write_archive(own)
            else:
                if batch_norms == {True}:
                    self.options["model.batch_norm"] = "train"
                if functions.by_key:
                    self._program = None

    def _write_onnx(self, torch, functions):
        _warn_of_wide_regions(torch, self._program.graph_module)
        program = torch.onnx.export(
            self._program,
            dynamo=True,
            opset_version=18,
            optimize=False,
            verbose=False,
            custom_translation_table=translations(),
        )
        _warn_of_lost_statistics(torch, program)
        functions.add_to(program)
        _separate_names(program.model.graph)
        _name_outputs(program.model.graph, self.outputs)
        _refuse_state(self._module, program.exported_program)
        _say_what_trains(self._module, program.model.graph)
        frozen = _frozen(self._module, set(program.model.graph.initializers))
        if frozen:
            self.options["params.frozen"] = frozen
        size = sum(p.numel() * p.element_size() for p in self._module.parameters())
        self.path = os.path.join(self._folder, "model.onnx")
        program.save(self.path, external_data=size > LARGEST)

    def _write_archive(self, refused):
        """Writes torch's archive, as there is no ONNX file, or it was refused. It says itself what is frozen and what
        trains."""
        import torch

        self.refused, self.options = refused, {}
        try:
            self._functional = self._program.run_decompositions({})
            _refuse_state(self._module, self._functional)
            self.path = os.path.join(self._folder, "model.pt2")
            torch.export.save(self._program, self.path)
        except FritError:
            raise
        except Exception:
            raise refused from refused.__cause__
        finally:
            self._program = None

    def compiled(self, compile):
        """What `compile` finds in the file. If it refuses operators of the ONNX file, it is given the archive."""
        try:
            return self._compiled_file(compile)
        except FritError as error:
            if self.refused is not None:
                raise _with_note(error, self.refused, "as ONNX") from self.refused.__cause__
            if error.code not in OPERATORS or self._program is None:
                raise
            first = error
        with _quiet(), _plain_attention():
            self._write_archive(first)
        try:
            return self._compiled_file(compile)
        except FritError as error:
            raise _with_note(first, error, "as torch's archive") from None

    def _compiled_file(self, compile):
        """What `compile` finds in the file; in an archive without writes in place, if it refuses these."""
        import torch

        try:
            return compile(self)
        except FritError as error:
            if self._functional is None or error.code != "E032" or "writing" not in str(error):
                raise
        torch.export.save(self._functional, self.path)
        return compile(self)


def _with_note(error, other, form):
    """An error with that of the other file as a note. What would help a file does not help a module."""
    if not error.diagnostics:
        return error
    first, *rest = error.diagnostics
    note = f"{form}: [{other.code}] {other.diagnostics[0]['message']}"
    remedy, text = first["remedy"], error.args[0]
    if remedy and "run_decompositions" in remedy:
        first = {**first, "remedy": _remedy(text)}
        text = text.replace(remedy, first["remedy"])
    noted = {**first, "notes": [*first["notes"], note]}
    return FritError(f"{text}\n  {note}", [noted, *rest])


def _refuse_parts(module):
    """Refuses what no file says of embeddings and norms, and warns of layers that are another function in evaluation."""
    for name, part in module.named_modules():
        kind = type(part).__name__
        if kind in ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d") and part.track_running_stats and part.training:
            remedy = "set track_running_stats=False: no file says that its running statistics are updated"
            raise refuse("E032", f"the instance normalization `{name}` has track_running_stats", remedy)
        if kind in ("AlphaDropout", "FeatureAlphaDropout", "RReLU") and part.training:
            evaluated = "draws its slopes" if kind == "RReLU" else "multiplies by the mean of its mask"
            warnings.warn(f"`{name}` is another function in evaluation and exports than `{kind}` in PyTorch: it {evaluated}", stacklevel=2)
        if getattr(part, "scale_grad_by_freq", False):
            remedy = "leave it out: no file says that its gradient is divided by how often each row is read"
            raise refuse("E032", f"the embedding `{name}` has scale_grad_by_freq", remedy)
        if getattr(part, "max_norm", None) is not None and hasattr(part, "num_embeddings"):
            remedy = "leave it out, or divide the rows that are read by their norms in `forward`"
            raise refuse("E032", f"the embedding `{name}` has max_norm, which writes its rows", remedy)


def _own(error, handled):
    """The error of Frit that one of torch was raised for, if any: none that was `handled` before."""
    while error is not None and error is not handled and not isinstance(error, FritError):
        error = error.__cause__ or error.__context__
    return None if error is handled else error


def _reason(torch, error):
    """What torch says of an export that failed, in short, and where in the module it was; the exception has all of it."""
    text = re.sub(r"\x1b?\[[0-9]+m", "", str(error))
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)', overload='([^']+)'", text)
    if missing:
        return "there is no ONNX form of {}.{}".format(*missing.groups())
    text = text.partition("## Exception summary")[2].strip() or text or type(error).__name__
    text = re.sub(r"^<class '[^']*'>: ", "", text.splitlines()[0])
    if isinstance(error, TypeError) and _conditions.SIZES.search(text):
        text = "a size depends on data"
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return text + _conditions.place_of(torch, error)


def _remedy(text):
    """What to do about an export that failed."""
    if "grouped_mm" in text:
        return 'call model.set_experts_implementation("batched_mm") of transformers first'
    if "a size depends on data" in text:
        return "give the size as a number, the largest one, and choose what counts by a mask"
    if "depends on data" in text:
        return _conditions.CHOOSE
    return "docs/exporting.md says what an export can carry"


def _arguments(example):
    if isinstance(example, dict):
        return (), example
    if isinstance(example, (tuple, list)):
        return tuple(example), None
    return (example,), None


@contextlib.contextmanager
def _training(module):
    """The module in training mode. One that is, is left as it is: parts of it may be meant to evaluate."""
    modes = [(m, m.training) for m in module.modules()]
    if not module.training:
        module.train()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextlib.contextmanager
def _flat(module):
    """The module with tensors only as results: what else a structure holds, such as a cache of keys, no file can.

    Yields the names of the results, which are known when the module has run; none for a single tensor.
    """
    import torch

    own, names = module.forward, []
    had = vars(module).get("forward")

    @functools.wraps(own)
    def forward(*args, **kwargs):
        found = own(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found
        if isinstance(found, Mapping):
            found = dict(found)
        elif dataclasses.is_dataclass(found):
            found = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
        elif isinstance(found, (tuple, list)):
            fields = getattr(found, "_fields", [f"output_{i}" for i in range(len(found))])
            found = dict(zip(fields, found))
        else:
            return found
        # Of a tensor that has two names, the first counts.
        tensors = {id(x): (str(n), x) for n, x in reversed(found.items()) if isinstance(x, torch.Tensor)}
        tensors = list(reversed(tensors.values()))
        names[:] = [n for n, _ in tensors]
        return dict(tensors)

    module.forward = forward
    try:
        yield names
    finally:
        if had is None:
            del module.forward
        else:
            module.forward = had


def _plain_attention():
    """Attention whose results have the layout that the exporter's decompositions give them. The fused kernels' differ, and
    a view of them that was traced does not decompose."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


@contextlib.contextmanager
def _quiet():
    """Without what torch says of every export, such as that training mode is meant, and of one that fails: graphs of many lines before
    the one error. What the caller asked for by TORCH_LOGS is below warnings, and is kept."""
    import torch

    own = logging.Logger.handle

    def handle(logger, record):
        if record.levelno < logging.WARNING or not f"{logger.name}.".startswith("torch."):
            own(logger, record)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(logging.Logger, "handle", handle))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None:
                stack.enter_context(patch.object(sys, name, _WithoutTorch(stream, torch)))
        stack.enter_context(warnings.catch_warnings())
        for message in ("Exporting a model while it is in training mode", "While compiling, we found certain side effects"):
            warnings.filterwarnings("ignore", message=message)
        yield


class _WithoutTorch:
    """A stream without what files of torch print. Its logging prints what the caller asked for."""

    def __init__(self, stream, torch):
        self._stream, self._folder = stream, os.path.dirname(torch.__file__) + os.sep

    def write(self, text):
        place = sys._getframe(1).f_code.co_filename
        if place.startswith(self._folder) and not place.startswith(os.path.join(self._folder, "_logging")):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _separate_names(graph):
    """Gives results of operations that have the name of a parameter, such as `t`, another one."""
    taken = {v.name for v in graph.inputs} | set(graph.initializers)
    results = [v for node in graph for v in node.outputs]
    taken_by_results = {v.name for v in results}
    for value in results:
        if value.name in taken:
            numbered = (f"{value.name}_{i}" for i in itertools.count(1))
            value.name = next(n for n in numbered if n not in taken and n not in taken_by_results)
            taken_by_results.add(value.name)


def _name_outputs(graph, names):
    """Gives results their names; one that is an input, or whose name an input has, keeps its own."""
    import onnx_ir

    inputs = {v.name for v in graph.inputs}
    inner = {v.name: v for node in graph for v in node.outputs}
    for i, (output, name) in enumerate(zip(list(graph.outputs), names)):
        if output.name in inputs or name in inputs or name in graph.initializers:
            continue
        if name in inner and inner[name] is not output:
            inner[name].name = f"{name}_inner"
        node = output.producer()
        if node is not None and "aten.detach." in node.metadata_props.get("pkg.torch.onnx.fx_node", ""):
            # Calls that read it name it: by another name, these would seem to read what was not detached.
            copy = onnx_ir.node("Identity", [output])
            graph.append(copy)
            graph.outputs[i] = copy.outputs[0]
            graph.outputs[i].shape, graph.outputs[i].type = output.shape, output.type
            output = graph.outputs[i]
        output.name = name


def _refuse_state(module, exported):
    """Refuses what forward writes although its outputs depend on it: every step would read what it was at the export. Running
    statistics are none. Warns of what else it writes."""
    import torch

    signature = exported.graph_signature
    norms = torch.nn.modules.batchnorm._NormBase
    statistics = {
        f"{name}.{buffer}" if name else buffer
        for name, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, norms)
        for buffer, _ in m.named_buffers()
    }
    for name in getattr(signature, "parameters_to_mutate", {}).values():
        remedy = "train it, or make it an input and an output of the module"
        raise refuse("E032", f"`forward` writes the parameter `{name}`", remedy)
    written = set(signature.buffers_to_mutate.values()) - statistics
    results = set(signature.user_outputs)
    for node in exported.graph.nodes:
        buffer = signature.inputs_to_buffers.get(node.name) if node.op == "placeholder" else None
        if buffer in written and results & _reached(node):
            message = f"`forward` writes the buffer `{buffer}`, and the outputs depend on it"
            remedy = "make it an input and an output of the module, or use the optimizer's moving average (`optimizer.ema`)"
            raise refuse("E032", message, remedy)
    own = sorted(written & set(module.state_dict()))
    if own:
        names = ", ".join(f"`{name}`" for name in own)
        warn(f"`forward` writes {names}, and a plan does not: state_dict() returns the initial values", stacklevel=6)


def _warn_of_lost_statistics(torch, program):
    """Says that the exporter removed calls of batch normalization, as nothing reads their results: these renew no running statistics."""
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    calls = sum(n.target is functional for n in program.exported_program.graph.nodes)
    text = "_native_batch_norm_legit_functional."
    kept = sum(
        n.op_type == "BatchNormalization" and text in n.metadata_props.get("pkg.torch.onnx.fx_node", "")
        for n in program.model.graph
    )
    if calls > kept:
        warnings.warn(
            f"nothing reads the results of {calls - kept} batch normalization(s): the plan does not renew their running statistics",
            stacklevel=2,
        )


#: Operators that autocast runs in low precision.
CONTRACTIONS = (
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "convolution", "einsum", "linear", "matmul", "mm", "mv",
    "scaled_dot_product_attention",
)  # fmt: skip


def _warn_of_wide_regions(torch, program):
    """Says that regions under ``torch.autocast(…, enabled=False)`` contract in the plan's precision: an ONNX file has no regions."""
    scopes = []
    wrapped = torch.ops.higher_order.wrap_with_autocast
    graphs = [part for part in program.modules() if hasattr(part, "graph")]
    regions = [(part, n) for part in graphs for n in part.graph.nodes if n.target is wrapped and n.args[2] is False]
    for part, region in regions:
        inside = getattr(part, region.args[4].target)
        for node in inside.graph.nodes:
            if getattr(node.target, "__name__", "").partition(".")[0] in CONTRACTIONS:
                stack = list((node.meta.get("nn_module_stack") or {}).values())
                scopes.append(stack[-1][0].removeprefix("L['self']").lstrip(".") if stack else "")
    if scopes:
        # What the exporter writes as the scope of a function in the module itself is empty.
        names = ", ".join(f"`{scope}`" for scope in dict.fromkeys(scopes) if scope)
        where = f" in {names}" if names else ""
        warnings.warn(
            f"the module turns autocast off for {len(scopes)} matmul(s) or convolution(s){where}, which the plan computes like the others: "
            'add a [[precision.override]] with their `scope` and dtype = "fp32"',
            stacklevel=2,
        )


def _reached(node):
    """Names of a node of a graph and of all that depend on it."""
    reached, open_ = {node.name}, [node]
    while open_:
        for user in open_.pop().users:
            if user.name not in reached:
                reached.add(user.name)
                open_.append(user)
    return reached


def _inputs(torch, program):
    """Names of the tensors that a program is given, in order."""
    specs = [s for s in program.graph_signature.input_specs if s.kind is torch.export.graph_signature.InputKind.USER_INPUT]
    return [s.arg.name for s in specs if isinstance(s.arg, torch.export.graph_signature.TensorArgument)]


def _say_what_trains(module, graph):
    """Adds to the signature of a graph which parameters train, so that none is taken for a fixed table by its values."""
    trains = {n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
    lines = graph.metadata_props.get(SIGNATURE, "").splitlines()
    named = ((line, line.split(" target='")[1].split("'")[0]) if " target='" in line else (line, None) for line in lines)
    lines = [line + " requires_grad=True" if name in trains and "PARAMETER" in line else line for line, name in named]
    if lines:
        graph.metadata_props[SIGNATURE] = "\n".join(lines)


def _frozen(module, initializers):
    """Names in the file of parameters that do not require gradients, which no file records."""
    names = (n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)
    return sorted(n for n in names if n in initializers)


def torch_state(module, values, trained):
    """The state dict of a module with the values of a plan: tied tensors share one, and buffers that the plan does not
    have keep theirs. Trained parameters that the module does not have come after them. What is complex is a pair in the plan."""
    import torch

    everything = module.state_dict()
    # What modules put there besides, such as their extra state, stays.
    own = {name: tensor for name, tensor in everything.items() if isinstance(tensor, torch.Tensor)}
    complexes = {name for name, tensor in own.items() if tensor.is_complex()}
    values = {name: torch.view_as_complex(x) if name in complexes else x for name, x in values.items()}
    by_memory = {}
    for name, tensor in own.items():
        if name in values:
            by_memory[_memory(tensor)] = values[name]
    state = {name: values.get(name, by_memory.get(_memory(tensor), tensor)) for name, tensor in own.items()}
    state = {name: state.get(name, value) for name, value in everything.items()}
    return {**state, **{name: value for name, value in values.items() if name in trained and name not in own}}


def _memory(tensor):
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else id(tensor)
