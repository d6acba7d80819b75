"""Carries torch.autograd.Function into an export: each becomes a function of the ONNX model that names its gradient.

An export traces ``forward`` and forgets ``backward``. While torch exports, a call is therefore one node, and both methods are exported
by themselves.
"""

import contextlib
import inspect

from frit._errors import FritError, refuse

#: Domain of the functions in the model.
DOMAIN = "autograd"
#: Operators that draw: backward would draw anew.
RANDOM = {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


class Functions:
    """The autograd functions of one export, by class, types of the tensors and other arguments."""

    def __init__(self, torch):
        self.torch = torch
        self.by_key = {}
        #: Why one cannot be carried; torch wraps what is raised while it exports.
        self.refused = None

    @contextlib.contextmanager
    def called(self):
        """While torch exports, their calls are nodes."""
        function = self.torch.autograd.Function
        original = function.__dict__["apply"]

        def apply(cls, *args, **kwargs):
            if not self.torch.compiler.is_exporting():
                return original.__get__(None, cls)(*args, **kwargs)
            # Checkpointing has the gradients of what it computes, although it computes it without.
            if cls is self.torch.utils.checkpoint.CheckpointFunction:
                return args[0](*args[2:])
            # Others of torch itself, too.
            if kwargs or cls.__module__.startswith("torch."):
                return original.__get__(None, cls)(*args, **kwargs)
            try:
                return self._node(cls, args)
            except FritError as error:
                self.refused = error
                raise

        function.apply = classmethod(apply)
        try:
            yield
        finally:
            function.apply = original

    def add_to(self, program):
        """Adds the functions to an exported program."""
        import onnx_ir

        for function in self.by_key.values():
            for proto in function.onnx():
                made = onnx_ir.serde.deserialize_function(proto)
                program.model.functions[made.identifier()] = made
        if self.by_key:
            program.model.graph.opset_imports[DOMAIN] = 1

    def _node(self, cls, args):
        torch = self.torch
        if not hasattr(torch.onnx.ops, "symbolic_multi_out"):
            message = f"this version of torch cannot export {cls.__name__} with its gradient"
            raise refuse("E010", message, "pip install 'torch>=2.8'")
        # Such a size has no hash.
        if any(not isinstance(n, int) for a in args if isinstance(a, torch.Tensor) for n in a.shape):
            remedy = "apply it before a mask selects rows, and export without dynamic shapes"
            raise refuse("E062", f"{cls.__name__} is given tensors of unknown sizes", remedy)
        parts = tuple(
            (tuple(a.shape), a.dtype) if isinstance(a, torch.Tensor) else ("value", repr(a)) for a in args
        )
        key = (cls, parts)
        if key not in self.by_key:
            name = f"{cls.__name__}_{len(self.by_key)}"
            self.by_key[key] = _Function(torch, name, cls, args)
        function = self.by_key[key]
        results = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{function.name}",
            [a for a in args if isinstance(a, torch.Tensor)],
            dtypes=[dtype for _, dtype in function.results],
            shapes=[list(shape) for shape, _ in function.results],
            version=1,
        )
        return tuple(results) if function.is_tuple else results[0]


class _Function:
    """An autograd function for tensors of some types and values of its other arguments."""

    def __init__(self, torch, name, cls, args):
        self.torch, self.name, self.cls = torch, name, cls
        self.args = [None if isinstance(a, torch.Tensor) else a for a in args]
        self.places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        if not self.places:
            raise refuse("E062", f"{cls.__name__}.apply is given no tensor", "give it its operands as arguments")
        self.operands = [(tuple(args[i].shape), args[i].dtype) for i in self.places]
        with torch.no_grad(), _untraced(torch):
            results, _ = self.forward([_example(torch, *operand) for operand in self.operands])
        self.is_tuple = isinstance(results, (tuple, list))
        results = list(results) if self.is_tuple else [results]
        if not all(isinstance(y, torch.Tensor) for y in results):
            raise refuse("E062", f"{cls.__name__}.forward returns more than tensors", "return tensors only")
        self.results = [(tuple(y.shape), y.dtype) for y in results]

    def forward(self, tensors):
        """Results for these tensors, and the context with what was saved."""
        args = list(self.args)
        for place, x in zip(self.places, tensors):
            args[place] = x
        ctx = _Context(self, args)
        run = inspect.unwrap(self.cls.forward)
        if self.cls.setup_context is self.torch.autograd.Function.setup_context:
            return run(ctx, *args), ctx
        results = run(*args)
        self.cls.setup_context(ctx, tuple(args), results)
        return results, ctx

    def backward(self, tensors, cotangents):
        """The gradients of the float tensors."""
        results, ctx = self.forward(tensors)
        results = results if isinstance(results, (tuple, list)) else [results]
        # A result of integers has none.
        dys = [dy if y.is_floating_point() else None for y, dy in zip(results, cotangents)]
        gradients = inspect.unwrap(self.cls.backward)(ctx, *dys)
        gradients = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
        # PyTorch takes more, if they are None.
        while len(gradients) > len(self.args) and gradients[-1] is None:
            gradients.pop()
        if len(gradients) != len(self.args):
            n, m = len(gradients), len(self.args)
            message = f"{self.cls.__name__}.backward returns {n} gradients for {m} arguments of forward"
            raise refuse("E062", message, "return one for each argument, or None")
        floats = [i for i, (_, dtype) in zip(self.places, self.operands) if dtype.is_floating_point]
        return [gradients[i] for i in floats]

    def onnx(self):
        """The ONNX functions of both methods."""
        function, torch, n = self, self.torch, len(self.operands)
        given = []

        class Forward(torch.nn.Module):
            def forward(self, *tensors):
                results, _ = function.forward(tensors)
                return tuple(results) if function.is_tuple else (results,)

        class Backward(torch.nn.Module):
            def forward(self, *tensors):
                gradients = function.backward(tensors[:n], tensors[n:])
                given[:] = [g is not None for g in gradients]
                return tuple(g for g in gradients if g is not None)

        operands = [_example(torch, *operand) for operand in self.operands]
        cotangents = [_example(torch, s, d if d.is_floating_point else torch.float32) for s, d in self.results]
        names = [f"x{i}" for i in range(n)], [f"y{i}" for i in range(len(self.results))]
        dys = [f"d{y}" for y in names[1]]
        forward = self._export(self.name, Forward(), operands, names[0], names[1])
        with torch.no_grad():
            Backward()(*operands, *cotangents)
        floats = [f"dx{i}" for i, has in enumerate(given) if has]
        backward = f"{self.name}_grad"
        if floats:
            backward = self._export(backward, Backward(), [*operands, *cotangents], [*names[0], *dys], floats)
        else:
            from onnx import helper

            backward = helper.make_function(DOMAIN, backward, [*names[0], *dys], [], [], [helper.make_opsetid("", 18)])
        # A gradient function is given the results too. A gradient without a name is none.
        del backward.input[:], backward.output[:]
        backward.input.extend([*names[0], *names[1], *dys])
        backward.output.extend(f"dx{i}" if has else "" for i, has in enumerate(given))
        for key, value in {"frit.gradient": f"{DOMAIN}::{backward.name}", "frit.precision": self._precision()}.items():
            if value is not None:
                entry = forward.metadata_props.add()
                entry.key, entry.value = key, value
        return [forward, backward]

    def _precision(self):
        """The dtype of torch.amp.custom_fwd(cast_inputs=…)."""
        dtype = inspect.getclosurevars(self.cls.forward).nonlocals.get("cast_inputs")
        return {self.torch.float32: "f32", self.torch.float16: "f16", self.torch.bfloat16: "bf16"}.get(dtype)

    def _export(self, name, module, examples, inputs, outputs):
        """The ONNX function of a module."""
        from onnx import helper

        with self.torch.no_grad():
            program = self.torch.onnx.export(
                module, tuple(examples), dynamo=True, opset_version=18, optimize=False, verbose=False
            )
        graph = program.model_proto.graph
        drawn = sorted({node.op_type for node in graph.node if node.op_type in RANDOM})
        if drawn:
            message = f"{self.cls.__name__} draws random numbers ({', '.join(drawn)}), and backward would draw others"
            raise refuse("E062", message, "draw them outside, and give them to it as a tensor")
        names = {value.name: given for value, given in zip(graph.input, inputs)}
        nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in graph.initializer]
        for node in graph.node:
            del node.metadata_props[:]
            operands = [names.get(operand, operand) for operand in node.input]
            del node.input[:]
            node.input.extend(operands)
            nodes.append(node)
        for value, output in zip(graph.output, outputs):
            nodes.append(helper.make_node("Identity", [names.get(value.name, value.name)], [output]))
        opsets = list(program.model_proto.opset_import)
        made = helper.make_function(DOMAIN, name, inputs, outputs, nodes, opsets)
        made.node[-1].name = name
        return made


class _Context:
    """What forward and backward are given as ``ctx``."""

    def __init__(self, function, args):
        tensor = function.torch.Tensor
        self.needs_input_grad = tuple(isinstance(a, tensor) and a.is_floating_point() for a in args)
        self.saved_tensors = ()
        self._frit_name = function.cls.__name__

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors):
        pass

    def mark_non_differentiable(self, *tensors):
        pass

    def set_materialize_grads(self, value):
        pass

    def mark_dirty(self, *tensors):
        message = f"{self._frit_name} changes its operands in place"
        raise refuse("E062", message, "let forward return new tensors")


def _untraced(torch):
    """What is computed here is no part of the export that is under way."""
    stack = contextlib.ExitStack()
    stack.enter_context(torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing())
    stack.enter_context(torch._subclasses.fake_tensor.unset_fake_temporarily())
    return stack


def _example(torch, shape, dtype):
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
