"""The program that torch traces of a module: ONNX files and archives are written from it."""

import contextlib
import operator
from collections import OrderedDict, defaultdict, deque
from unittest.mock import patch

from frit import _functions, _linalg, _losses
from frit._complex import as_pairs
from frit._conditions import Origins
from frit._errors import FritError, refuse


#: Calls that are their operand where they change neither its type nor its layout, and calls that share its memory.
SAME, SHARED = {"to", "contiguous"}, {"detach", "alias"}


def traced(torch, module, args, kwargs):
    """The program of a module, in which gradients stop where they stop in the module."""
    origins = Origins(torch, module)
    with torch.enable_grad():
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(_unchanged(torch, module))
                for context in _CONTEXTS:
                    stack.enter_context(context(torch))
                stack.enter_context(_idle_conversions(torch, module))
                stack.enter_context(origins.no_conditions_on_sizes())
                stack.enter_context(_stand_ins(torch, origins))
                program = torch.export.export(module, args, kwargs, strict=False)
        except Exception as error:
            program = None if isinstance(error, FritError) else _strict(torch, module, args, kwargs)
            if program is None:
                explained = origins.explained(error)
                if explained is not None:
                    raise explained from error
                raise
    _leave_out_own_writes(torch, program)
    _refuse_lost_writes(torch, module, program)
    _detach_regions(torch, program)
    for graph in _graphs(torch, program):
        _rewrite(torch, graph)
    as_pairs(torch, program)
    return program


def _strict(torch, module, args, kwargs):
    """The program as dynamo traces it, which takes `assert` of tensors; None if it fails. It forgets without a word `.data`,
    inference mode and the backward of functions: None also if the module has these."""
    forgotten = []

    def noted(original):
        def method(*args, **kwargs):
            forgotten.append(original)
            return original(*args, **kwargs)

        return method

    with contextlib.ExitStack() as stack:
        stack.enter_context(_unchanged(torch, module))
        try:
            from torch._dynamo.variables import ctx_manager, misc, tensor

            own = staticmethod(noted(ctx_manager.InferenceModeVariable.create))
            stack.enter_context(patch.object(ctx_manager.InferenceModeVariable, "create", own))
            for cls, name in [(misc.AutogradFunctionVariable, "call_apply"), (tensor.TensorVariable, "method_attr_data")]:
                stack.enter_context(patch.object(cls, name, noted(getattr(cls, name))))
            program = torch.export.export(module, args, kwargs, strict=True)
        except Exception:
            return None
    return None if forgotten else program


@contextlib.contextmanager
def _inference_as_no_grad(torch):
    """`torch.inference_mode()` as a region without gradients; torch traces it as if it were not there."""
    cls = torch.inference_mode
    enter, leave = cls.__enter__, cls.__exit__

    def entered(self):
        self._frit_region = torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode)

    def left(self, *_):
        torch.set_grad_enabled(self._frit_region.prev)

    cls.__enter__, cls.__exit__ = entered, left
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


def _unchecked_distributions(torch):
    """Distributions do not check what they are given: that would be a condition on data."""
    return patch.object(torch.distributions.Distribution, "_validate_args", False)


@contextlib.contextmanager
def _plain_choices(torch):
    """Choices of torch's modules among ways to compute the same, which depend on data or cannot be written to a file: whether the
    mask of a transformer is causal, and whether a linear layer and its loss are computed in chunks."""
    functional, transformer = torch.nn.functional, torch.nn.modules.transformer
    choices = [
        (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True),
        (functional, "_linear_cross_entropy_chunked_applies", lambda *args, **kwargs: False),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, choice in choices:
            # Of the versions of torch that have it.
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, choice))
        yield


@contextlib.contextmanager
def _unchanged(torch, module):
    """A module that is afterwards what it was. What `forward` keeps, such as a table, would be a tensor of the trace, without values."""
    kept, open_, seen = [], [module], set()
    while open_:
        value = open_.pop()
        if isinstance(value, torch.nn.Module):
            value = vars(value)
        is_list = type(value) in (list, deque)
        if id(value) in seen or not (is_list or type(value) in (dict, OrderedDict, defaultdict, tuple, set)):
            continue
        seen.add(id(value))
        copied = value.copy() if type(value) is not tuple else value
        kept.append((value, copied))
        open_ += copied.values() if isinstance(copied, dict) else copied
    try:
        yield
    finally:
        for value, copied in kept:
            if type(value) is tuple or _is_same(value, copied):
                continue
            value.clear()
            value.extend(copied) if type(value) in (list, deque) else value.update(copied)


def _is_same(value, copied):
    """Whether a container holds the objects of its copy in their order, by identity: tensors have no equality that is a bool."""
    own, other = (c.items() if isinstance(c, dict) else ((None, x) for x in c) for c in (value, copied))
    return len(value) == len(copied) and all(a is b and x is y for (a, x), (b, y) in zip(own, other))


@contextlib.contextmanager
def _idle_conversions(torch, traced_module):
    """Conversions in `forward`, such as `self.layer.to(x.device)`, write parameters. What changes nothing is left out, the rest refused."""
    from torch._subclasses import FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

    own = torch.nn.Module._apply

    def is_idle(module, convert):
        tensors = [t for group in (module._parameters, module._buffers) for t in group.values() if t is not None]
        with _disable_current_modes(), torch._C.DisableTorchFunction(), FakeTensorMode(), torch.no_grad():
            for tensor in tensors:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                if convert(like) is not like:
                    return False
        return True

    def converted(self, fn, recurse=True):
        if not torch.compiler.is_exporting():
            return own(self, fn, recurse)
        if not is_idle(self, fn):
            if not any(p is not None for p in self._parameters.values()):
                return own(self, fn, recurse)
            name = next((f"`{n}`" for n, m in traced_module.named_modules() if m is self and n), "the module")
            remedy = "convert the module before, and in `forward` what the parameters meet"
            raise refuse("E032", f"`forward` converts the parameters of {name}", remedy)
        for child in self.children() if recurse else ():
            child._apply(fn)
        return self

    with patch.object(torch.nn.Module, "_apply", converted):
        yield


def _stand_ins(torch, origins):
    """What is called in place of what torch cannot trace: functions by their definitions, `x.detach()` for `x.data`, which it equals
    where nothing writes it, and writes in place for those of `x.data`."""
    definitions = _losses.traceable(torch) | _functions.traceable(torch)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if not torch.compiler.is_exporting():
                return call(func, args, kwargs)
            with origins.followed(func, args, kwargs) as results:
                if func == torch.Tensor.data.__get__:
                    found = args[0].detach()
                elif func == torch.Tensor.data.__set__ and _are_alike(*args):
                    with torch.no_grad():
                        found = args[0].copy_(args[1])
                else:
                    found = call(func, args, kwargs)
                _expect_elements(torch, found)
                results.append(found)
            return found

    def call(func, args, kwargs):
        stand_in = definitions.get(func)
        found = stand_in(*args, **kwargs) if stand_in else None
        return func(*args, **kwargs) if found is None else found

    return Mode()


def _are_alike(one, other):
    """Whether two values are tensors of the same kind. Sizes that depend on data are compared by their symbols: they have no numbers."""
    if not all(hasattr(value, "shape") for value in (one, other)):
        return False
    return [*map(str, one.shape), one.dtype, one.device] == [*map(str, other.shape), other.dtype, other.device]


def _expect_elements(torch, results):
    """Of what a mask selects torch does not know how much it is, and will not compute what is another thing for nothing or a single
    element. It computes what it would for more; what that makes of none is what it makes of them at run time."""
    for result in results if isinstance(results, (tuple, list)) else (results,):
        for size in result.shape if isinstance(result, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and not size.node.has_hint():
                torch._check(size >= 2)


_CONTEXTS = (_inference_as_no_grad, _unchecked_distributions, _plain_choices)


def _graphs(torch, program):
    return [m.graph for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]


def _stops(torch, node):
    """Whether a node is a region without gradients."""
    return node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False


def _region(torch, node):
    """The graph of a region and the operands that it is called with, or None."""
    for i, arg in enumerate(node.args):
        if isinstance(arg, torch.fx.Node) and arg.op == "get_attr":
            inner = getattr(node.graph.owning_module, arg.target, None)
            if isinstance(inner, torch.fx.GraphModule):
                return inner.graph, node.args[i + 1 :]
    return None


def _is_float(torch, node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _detach_regions(torch, program):
    """Detaches the results of regions without gradients, which decompositions dissolve."""
    for node in [n for graph in _graphs(torch, program) for n in graph.nodes if _stops(torch, n)]:
        graph, _ = _region(torch, node)
        results = graph.output_node()
        with graph.inserting_before(results):
            for value in {v for v in results.all_input_nodes if _is_float(torch, v)}:
                detached = _call(graph, torch.ops.aten.detach.default, (value,), value.meta["val"])
                results.replace_input_with(value, detached)
        graph.owning_module.recompile()


def _rewrite(torch, graph):
    """Writes calls that exporters fail on as others of the same results."""
    aten = torch.ops.aten
    checks = {aten._assert_scalar.default, aten._assert_async.default, aten._assert_async.msg}
    checks.add(aten._assert_tensor_metadata.default)
    unchecked = _linalg.checks(torch)
    drawn = {aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor}
    for node in list(graph.nodes):
        operands = node.all_input_nodes
        if node.target in (aten.embedding.default, aten.embedding_bag.default) and node.args[3:4] == (True,):
            remedy = "leave it out: no file says that its gradient is divided by how often each row is read"
            raise refuse("E032", f"an embedding has scale_grad_by_freq{_place(node)}", remedy)
        if node.target in checks:
            # What is checked must not be a condition on data.
            graph.erase_node(node)
            _erase_unread(torch, operands)
        elif node.target is aten.rsub.Scalar and _is_float(torch, node) and not _is_float(torch, operands[0]):
            value = operands[0].meta["val"].to(node.meta["val"].dtype)
            with graph.inserting_before(node):
                wide = _call(graph, aten._to_copy.default, (operands[0],), value, {"dtype": value.dtype})
            node.replace_input_with(operands[0], wide)
        elif node.target in drawn:
            # What is drawn has no gradient.
            with graph.inserting_before(node):
                for operand in operands:
                    node.replace_input_with(operand, _call(graph, aten.detach.default, (operand,), operand.meta["val"]))
        elif node.target in unchecked:
            value = node.meta["val"]
            info = torch.empty(value.shape[:-2], dtype=torch.int32, device="meta")
            with graph.inserting_before(node):
                both = _call(graph, unchecked[node.target], node.args, (value, info), node.kwargs)
            node.target, node.args, node.kwargs = operator.getitem, (both, 0), {}
        elif node.target is aten.fill_diagonal_.default and node.meta["val"].dim() == 2 and node.args[2:] != (True,):
            written = node.meta["val"]
            with written.fake_mode, graph.inserting_before(node):
                kind = {"dtype": torch.bool, "device": written.device}
                eye = _call(graph, aten.eye.m, tuple(written.shape), torch.eye(*written.shape, **kind), kind)
            node.target, node.args = aten.masked_fill_.Scalar, (node.args[0], eye, node.args[1])
        elif node.target is aten.mean.dim and node.args[1] is None:
            every = list(range(operands[0].meta["val"].dim()))
            node.args = (node.args[0], every, *node.args[2:])
        elif node.target is aten.uniform_.default:
            written, low, high = (*node.args, *(0.0, 1.0)[len(node.args) - 1 :])
            value = node.meta["val"]
            with value.fake_mode, graph.inserting_before(node):
                drawn_like = _call(graph, aten.rand_like.default, (written,), torch.rand_like(value))
                scaled = _call(graph, aten.mul.Scalar, (drawn_like, high - low), torch.rand_like(value))
                moved = _call(graph, aten.add.Scalar, (scaled, low), torch.rand_like(value))
            node.target, node.args, node.kwargs = aten.copy_.default, (written, moved), {}
        elif node.target is aten.randperm.default and isinstance(node.args[0], int):
            value = node.meta["val"]
            with value.fake_mode, graph.inserting_before(node):
                keys = _call(graph, aten.rand.default, (list(node.args),), torch.rand(*node.args))
            node.target, node.args, node.kwargs = aten.argsort.default, (keys,), {}
    graph.owning_module.recompile()


def _erase_unread(torch, nodes):
    """Erases calls that nothing reads, and those of their operands that only they read."""
    for node in nodes:
        if node.op == "call_function" and not node.users and not node.is_impure():
            operands = node.all_input_nodes
            node.graph.erase_node(node)
            _erase_unread(torch, operands)


def _call(graph, target, args, value, kwargs=None):
    """A new call, which has this value."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = value
    return node


def _leave_out_own_writes(torch, program):
    """Leaves out writes of what is there already, such as `self.table = self.table.to(x.device)` of a buffer."""
    aten = torch.ops.aten
    writes = {getattr(aten, name).default for name in ("copy_", "set_data", "shallow_copy_data_") if hasattr(aten, name)}
    higher = torch.ops.higher_order
    regions = (higher.wrap_with_set_grad_enabled, higher.wrap_with_autocast)
    for graph in reversed(_graphs(torch, program)):
        for node in list(graph.nodes):
            if node.target in regions:
                # What a region returns of its operands as it is given is the operand itself, with its gradient.
                inner, given = _region(torch, node)
                places = [p for p in inner.nodes if p.op == "placeholder"]
                results = [_origin(torch, r, SAME) for r in inner.output_node().args[0]]
                for user in list(node.users):
                    result = results[user.args[1]] if user.target is operator.getitem else None
                    if result in places:
                        user.replace_all_uses_with(given[places.index(result)])
                        graph.erase_node(user)
                if not node.users and not any(n.target in regions or _is_write(n) for n in inner.nodes):
                    held = [n for n in node.all_input_nodes if n.op == "get_attr" and len(n.users) == 1]
                    graph.erase_node(node)
                    for n in held:
                        graph.erase_node(n)
            elif node.target in writes and _are_alike(*(v.meta.get("val") for v in node.args[:2])):
                written, value = node.args[:2]
                if _origin(torch, written, SAME | SHARED) is _origin(torch, value, SAME | SHARED):
                    node.replace_all_uses_with(_origin(torch, written, SAME))
                    graph.erase_node(node)
        graph.owning_module.recompile()


def _origin(torch, node, through):
    """The value that a node is by calls `through` which it is all of the same memory, read alike."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        operands = node.all_input_nodes
        # `copy=True` makes a copy.
        is_copied = any(a is True for a in (*node.args[1:], *node.kwargs.values()))
        if schema is None or schema.name.removeprefix("aten::") not in through or len(operands) != 1 or is_copied:
            break
        own, other = node.meta.get("val"), operands[0].meta.get("val")
        if not _are_alike(own, other) or str(own.stride()) != str(other.stride()):
            break
        node = operands[0]
    return node


def _is_write(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _refuse_lost_writes(torch, module, program):
    """Refuses what changes a value in place but not its gradient: a file has no operation that does."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names = program.graph_signature.inputs_to_parameters
    trained = {
        node
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and parameters[names[node.name]].requires_grad
    }
    found = _lost_write(torch, program.graph, trained, True)
    if found is not None:
        base, node = found
        what = f"the parameter `{names[base.name]}`" if base.name in names else f"`{base.name}`"
        raise refuse(
            "E032",
            f"`forward` writes {what} in place without its gradient{_place(node)}",
            "compute another tensor: x + (f(x) - x).detach() has the values of f(x) and the gradient of x",
        )


def _lost_write(torch, graph, trained, flows):
    """The first such write in a graph and the value that it writes. Gradients flow to the nodes `trained`, to which others
    are added, and through the graph's operations only if it `flows`."""
    detach = torch.ops.aten.detach.default
    bases = _bases(torch, graph)
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for i, node in enumerate(calls):
        region = _region(torch, node)
        if region is not None:
            inner, given = region
            places = [p for p in inner.nodes if p.op == "placeholder"]
            own = {p for p, v in zip(places, given) if isinstance(v, torch.fx.Node) and v in trained}
            found = _lost_write(torch, inner, own, flows and not _stops(torch, node))
            if found is not None:
                base, write = found
                return (given[places.index(base)] if base in places else base), write
        for value in _arguments(torch, node, lambda alias: alias.is_write):
            base, detached = bases.get(value, (value, False))
            # What was detached may be written if nobody reads what it was detached from.
            later = [v for n in calls[i + 1 :] + [graph.output_node()] for v in n.all_input_nodes]
            is_read = any(bases.get(v, (v, False)) == (base, False) for v in later)
            if base in trained and (not flows or (detached and is_read)):
                return base, node
        # A region has several results, which are taken from it by `getitem`.
        is_value = region is not None or _is_float(torch, node)
        is_stopped = node.target is detach or _stops(torch, node)
        if flows and is_value and not is_stopped and any(v in trained for v in node.all_input_nodes):
            trained.add(node)
    return None


def _bases(torch, graph):
    """Of views, the value whose memory they share, and whether they were detached from it."""
    bases = {}
    for node in graph.nodes:
        detached = node.target is torch.ops.aten.detach.default
        operands = node.args[:1] if node.target is operator.getitem else _arguments(torch, node, bool)
        for value in operands:
            base, before = bases.get(value, (value, False))
            bases[node] = (base, before or detached)
    return bases


def _arguments(torch, node, chosen):
    """Operands whose memory a call shares or writes."""
    schema = getattr(node.target, "_schema", None)
    pairs = zip(schema.arguments if schema else (), node.args)
    return [v for a, v in pairs if isinstance(v, torch.fx.Node) and a.alias_info and chosen(a.alias_info)]


def _place(node):
    """Where in the module's source a node was traced from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    places = [line for line in lines if line.startswith("File ")]
    return f", {places[-1].removeprefix('File ')}" if places else ""
