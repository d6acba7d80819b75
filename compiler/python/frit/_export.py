"""Exports torch modules for training, as docs/exporting.md teaches."""

import contextlib
import os
import warnings

from frit._errors import refuse

#: Parameters of more bytes are stored beside the model: the file format holds 2 GiB.
LARGEST = 1 << 30


def is_module(model):
    """Whether it is a torch module; torch is not imported for that."""
    return any(
        c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in type(model).__mro__
    )


def export(module, example_inputs, path):
    """Writes a module as ONNX, in training mode and with the names of its parameters.

    The shapes are those of the example inputs. Returns options that the file cannot carry: what is frozen, and that
    BatchNorm normalizes by its batch.
    """
    import torch

    if example_inputs is None:
        raise refuse("E097", "a torch module needs example inputs", "give example_inputs: a tensor, a tuple, or a dict")
    args, kwargs = _arguments(example_inputs)
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    with _training(module), warnings.catch_warnings():
        norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        batch_norms = {m.training and m.track_running_stats for m in norms}
        try:
            # Training mode is what is meant.
            warnings.filterwarnings("ignore", message="Exporting a model while it is in training mode")
            program = torch.onnx.export(
                module, args, kwargs=kwargs, dynamo=True, opset_version=18, optimize=False, verbose=False
            )
            program.save(os.fspath(path), external_data=size > LARGEST)
        except ImportError as error:
            raise refuse("E010", f"torch cannot export: {error}", "pip install onnx onnxscript") from error
        except Exception as error:
            message = f"torch cannot export the module: {error}"
            raise refuse("E010", message, "docs/exporting.md says what an export can carry") from error
    options = {}
    if batch_norms == {True}:
        options["model.batch_norm"] = "train"
    elif len(batch_norms) > 1:
        remedy = "export it with the TorchScript exporter and compile the file: docs/exporting.md says how"
        raise refuse("E053", "some batch normalizations of the module train and others do not", remedy)
    frozen = _frozen(module, set(program.model.graph.initializers))
    if frozen:
        options["params.frozen"] = frozen
    return options


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


def _frozen(module, initializers):
    """Names in the file of parameters that do not require gradients, which no file records."""
    names = (n for n, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)
    return sorted(n for n in names if n in initializers)


def torch_state(module, values, trained):
    """The state dict of a module with the values of a plan: tied tensors share one, and buffers that the plan does not
    have keep theirs. Trained parameters that the module does not have come after them."""
    own = module.state_dict()
    by_memory = {}
    for name, tensor in own.items():
        if name in values:
            by_memory[_memory(tensor)] = values[name]
    state = {name: values.get(name, by_memory.get(_memory(tensor), tensor)) for name, tensor in own.items()}
    return {**state, **{name: value for name, value in values.items() if name in trained and name not in own}}


def _memory(tensor):
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else id(tensor)
