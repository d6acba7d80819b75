"""Complex tensors of a program as pairs of real ones: a last axis holds the real and the imaginary part, as `torch.view_as_real` has them.

The exporter has few operators on complex tensors. Those without a rule here, Fourier transforms above all, keep theirs.
"""

import operator

from frit._errors import refuse


def as_pairs(torch, program):
    """Rewrites the calls of a program on complex tensors, and its complex buffers."""
    graph = program.graph_module.graph
    if not any(_is_complex(torch, node) for node in graph.nodes):
        return
    pairs = _Pairs(torch, graph)
    for node in list(graph.nodes):
        if node.op == "placeholder" and _is_complex(torch, node):
            _store_pair(torch, program, node)
            pairs.of[node] = node
        elif node.op == "call_function":
            pairs.rewrite(node)
        elif node.op == "output":
            pairs.restore(node)
    for node in reversed(pairs.replaced):
        if not node.users:
            graph.erase_node(node)
    program.graph_module.recompile()


def _is_complex(torch, node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def _store_pair(torch, program, node):
    """Stores a complex parameter, buffer or constant as a pair. Optimizers of torch take parameters for pairs, too."""
    signature = program.graph_signature
    kinds = (signature.inputs_to_parameters, signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants)
    name = next((kind[node.name] for kind in kinds if node.name in kind), None)
    if name is None:
        raise refuse("E032", f"the input `{node.name}` is complex", "give its real and imaginary parts")
    for store in (program.state_dict, program.constants):
        stored = store.get(name)
        if isinstance(stored, torch.Tensor):
            store[name] = torch.view_as_real(stored.detach().resolve_conj()).clone(memory_format=torch.contiguous_format)
            if isinstance(stored, torch.nn.Parameter):
                store[name] = torch.nn.Parameter(store[name], requires_grad=stored.requires_grad)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.view_as_real(node.meta["val"].resolve_conj()).contiguous()


class _Pairs:
    def __init__(self, torch, graph):
        self.torch, self.graph = torch, graph
        #: The pair that stands for each complex node.
        self.of = {}
        #: Calls in whose place others are.
        self.replaced = []
        self.rules = _rules(torch)
        values = (n.meta.get("val") for n in graph.nodes)
        self.mode = next(v.fake_mode for v in values if isinstance(v, torch.Tensor))

    def rewrite(self, node):
        operands = [n for n in node.all_input_nodes if n in self.of]
        value = node.meta.get("val")
        makes = _is_complex(self.torch, node) or (
            isinstance(value, (tuple, list)) and any(isinstance(v, self.torch.Tensor) and v.is_complex() for v in value)
        )
        if not makes and not operands:
            return
        self.refuse_lost_write(node)
        rule = self.rules.get(node.target)
        with self.graph.inserting_before(node):
            found = rule(self, node) if rule else None
        if found is None:
            with self.graph.inserting_before(node):
                self.restore(node)
            if _is_complex(self.torch, node):
                with self.graph.inserting_after(node):
                    plain = self.call(self.torch.ops.aten.resolve_conj.default, node)
                with self.graph.inserting_after(plain):
                    self.of[node] = self.call(self.torch.ops.aten.view_as_real.default, plain)
            return
        self.replaced.append(node)
        if makes:
            self.of[node] = found
        else:
            node.replace_all_uses_with(found)

    def refuse_lost_write(self, node):
        """Refuses to write into a conjugate, which is a view of another tensor that its pair is not."""
        aten = self.torch.ops.aten
        turned = {aten._conj.default, aten.conj.default, aten.mH.default, aten.matrix_H.default, aten.adjoint.default}
        base = node if getattr(getattr(node.target, "_schema", None), "is_mutable", False) else None
        while isinstance(base, self.torch.fx.Node) and base.op == "call_function":
            if base.target in turned:
                raise refuse("E032", "`forward` writes into the conjugate of a tensor", "write into a copy, `x.conj().clone()`")
            base = base.args[0] if base.args else None

    def restore(self, node):
        """Gives a node complex operands again."""
        for operand in [n for n in node.all_input_nodes if n in self.of]:
            with self.graph.inserting_before(node):
                whole = self.call(self.torch.ops.aten.view_as_complex.default, self.of[operand])
            node.replace_input_with(operand, whole)

    def call(self, target, *args, **kwargs):
        """A new call, with the value that it has."""
        node = self.graph.call_function(target, args, kwargs)
        args, kwargs = self.torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode, self.torch.no_grad():
            node.meta["val"] = target(*args, **kwargs)
        return node

    def pair(self, x):
        """The pair of an operand, which may be real or a number."""
        aten = self.torch.ops.aten
        if isinstance(x, self.torch.fx.Node):
            if x in self.of:
                return self.of[x]
            return self.joined(x, self.call(aten.zeros_like.default, x))
        parts = [complex(x).real, complex(x).imag]
        return self.joined(*(self.call(aten.full.default, [], part, dtype=self.torch.float32) for part in parts))

    def joined(self, real, imaginary):
        return self.call(self.torch.ops.aten.stack.default, [real, imaginary], -1)

    def parts(self, x):
        """Real and imaginary part of an operand; None for that of a real one."""
        if isinstance(x, self.torch.fx.Node) and x not in self.of:
            return x, None
        if isinstance(x, (int, float)):
            return x, None
        if isinstance(x, complex):
            return x.real, x.imag
        return self.split(self.of[x])

    def split(self, pair):
        return tuple(self.call(self.torch.ops.aten.select.int, pair, -1, i) for i in (0, 1))


def _rules(torch):
    """How calls are written on pairs. A rule gives the pair of the result, the result if that is real, or None."""
    aten = torch.ops.aten

    def dims(p, x):
        """The rank of an operand, without the axis of a pair."""
        return p.of[x].meta["val"].dim() - 1 if x in p.of else x.meta["val"].dim()

    def rank(p, node):
        return dims(p, node.args[0])

    def along(dim, n):
        return dim + n if dim < 0 else dim

    def same(p, node):
        """An operator that is the same on each part."""
        return p.call(node.target, *[p.of.get(a, a) if isinstance(a, torch.fx.Node) else a for a in node.args], **node.kwargs)

    def copied(p, node):
        layout = {"memory_format": torch.contiguous_format}
        plain = node.target is aten.clone.default and node.kwargs.get("memory_format") is not torch.contiguous_format
        return p.call(aten.clone.default, p.pair(node.args[0]), **({} if plain else layout))

    def itself(p, node):
        return p.of.get(node.args[0])

    def by_axis(place, more=0):
        """An operator along an axis, whose argument is at a place of its call."""

        def rule(p, node):
            if len(node.args) < place or node.args[0] not in p.of:
                return None
            args = [*node.args, 0][: max(len(node.args), place + 1)]
            if args[place] is None:
                return None
            args[place] = along(args[place], rank(p, node) + more)
            return p.call(node.target, p.of[args[0]], *args[1:], **node.kwargs)

        return rule

    def cut(p, node):
        args = [p.of[node.args[0]], *node.args[1:]]
        if len(args) > 1:
            args[1] = along(args[1], rank(p, node))
        return p.call(node.target, *args, **node.kwargs)

    def sized(p, node):
        return p.call(node.target, p.of[node.args[0]], [*node.args[1], 2], **node.kwargs)

    def shaped(p, node):
        """In the shape of another."""
        target = aten.expand.default if node.target is aten.expand_as.default else aten.reshape.default
        return p.call(target, p.of[node.args[0]], [*node.meta["val"].shape, 2]) if node.args[0] in p.of else None

    def repeated(p, node):
        return p.call(node.target, p.of[node.args[0]], [*node.args[1], 1], **node.kwargs)

    def exchanged(p, node):
        n = rank(p, node)
        return p.call(aten.transpose.int, p.of[node.args[0]], *(along(d, n) for d in node.args[1:3]))

    def turned(p, node):
        n = rank(p, node)
        return p.call(aten.permute.default, p.of[node.args[0]], [*reversed(range(n)), n])

    def matrices_turned(p, node):
        n = rank(p, node)
        return p.call(aten.transpose.int, p.of[node.args[0]], n - 2, n - 1)

    def permuted(p, node):
        n = rank(p, node)
        return p.call(aten.permute.default, p.of[node.args[0]], [*(along(d, n) for d in node.args[1]), n])

    def flattened(p, node):
        n = rank(p, node)
        first, last = (along(d, n) for d in (*node.args[1:], *(0, -1)[len(node.args) - 1 :]))
        return p.call(aten.flatten.using_ints, p.of[node.args[0]], first, last) if n else None

    def joined(more):
        def rule(p, node):
            list_, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
            n = dims(p, list_[0]) + more
            return p.call(node.target, [p.pair(x) for x in list_], along(dim, n))

        return rule

    def summed(p, node):
        n = rank(p, node)
        if node.args[0] not in p.of:
            return None
        axes = node.args[1] if len(node.args) > 1 else None
        axes = [along(d, n) for d in axes] if axes else list(range(n))
        if not axes:
            return p.of[node.args[0]]
        target = aten.mean.dim if node.target in (aten.mean.default, aten.mean.dim) else aten.sum.dim_IntList
        return p.call(target, p.of[node.args[0]], axes, *node.args[2:3])

    def padded(p, node):
        # By zeros: a mode and a value may follow.
        if any(arg not in ("constant", None, 0) for arg in node.args[2:]):
            return None
        return p.call(aten.constant_pad_nd.default, p.of[node.args[0]], [0, 0, *node.args[1]])

    def flipped(p, node):
        n = rank(p, node)
        return p.call(node.target, p.of[node.args[0]], [along(d, n) for d in node.args[1]])

    def rolled(p, node):
        n = rank(p, node)
        if len(node.args) < 3 or not node.args[2]:
            return None
        return p.call(node.target, p.of[node.args[0]], node.args[1], [along(d, n) for d in node.args[2]])

    def filled(value):
        def rule(p, node):
            if not _is_complex(torch, node):
                return None
            number = complex(node.args[1] if value is None else value)
            dtype = torch.float64 if node.meta["val"].dtype == torch.complex128 else torch.float32
            shape = list(node.meta["val"].shape)
            return p.joined(*(p.call(aten.full.default, shape, v, dtype=dtype) for v in (number.real, number.imag)))

        return rule

    def sum_of(sign):
        def rule(p, node):
            a, b = node.args[:2]
            alpha = sign * node.kwargs.get("alpha", 1)
            return p.call(aten.add.Tensor, p.pair(a), p.pair(b), **({} if alpha == 1 else {"alpha": alpha}))

        return rule

    def times(p, a, b):
        # The first operand is no number.
        return p.call(aten.mul.Tensor, *((a, b) if isinstance(a, torch.fx.Node) else (b, a)))

    def product(p, a, b):
        """Of two in parts."""
        return by_parts(p, a, b, lambda x, y: times(p, x, y))

    def multiplied(p, node):
        return product(p, *(p.parts(x) for x in node.args[:2]))

    def raised(p, node):
        """A whole power, by repeated products."""
        n = 2 if node.target is aten.square.default else node.args[1]
        if n not in range(1, 9):
            return None
        parts, found = p.parts(node.args[0]), p.of[node.args[0]]
        for _ in range(int(n) - 1):
            found = product(p, p.split(found), parts)
        return found

    def inverse(p, x):
        """`conj(x) / |x|²` in parts."""
        real, imaginary = p.parts(x)
        size = p.call(aten.add.Tensor, times(p, real, real), times(p, imaginary, imaginary))
        return [p.call(aten.div.Tensor, part, size) for part in (real, p.call(aten.neg.default, imaginary))]

    def inverted(p, node):
        return p.joined(*inverse(p, node.args[0]))

    def divided(p, node):
        a, b = node.args[:2]
        if node.kwargs or isinstance(b, complex):
            return None
        if b in p.of:
            return product(p, p.parts(a), inverse(p, b))
        return p.joined(*(p.call(aten.div.Tensor, part, b) for part in p.parts(a)))

    def contracted(contract):
        """A product of two, which `contract` makes of a real first and second factor."""

        def rule(p, node):
            factors = contract.factors(node)
            if factors is None:
                return None
            return by_parts(p, *(p.parts(x) for x in factors), lambda a, b: contract(p, node, a, b))

        return rule

    def by_parts(p, first, second, of):
        """What is linear in each of two, of their parts."""
        (ar, ai), (br, bi) = first, second
        if ai is None:
            return p.joined(of(ar, br), of(ar, bi))
        if bi is None:
            return p.joined(of(ar, br), of(ai, br))
        real = p.call(aten.sub.Tensor, of(ar, br), of(ai, bi))
        return p.joined(real, p.call(aten.add.Tensor, of(ar, bi), of(ai, br)))

    def matmul(p, node, a, b):
        return p.call(node.target, a, b)

    matmul.factors = lambda node: node.args[:2]

    def einsum(p, node, a, b):
        return p.call(node.target, node.args[0], [a, b])

    einsum.factors = lambda node: node.args[1] if len(node.args[1]) == 2 else None

    def conjugate(p, node):
        real, imaginary = p.parts(node.args[0])
        return p.joined(real, p.call(aten.neg.default, imaginary))

    def turned_over(p, node):
        pair, n = conjugate(p, node), rank(p, node)
        return p.call(aten.transpose.int, pair, n - 2, n - 1) if n > 1 else pair

    def exponential(p, node):
        real, imaginary = p.parts(node.args[0])
        return polar_of(p, p.call(aten.exp.default, real), imaginary)

    def polar_of(p, size, angle):
        return p.joined(*(times(p, size, p.call(f, angle)) for f in (aten.cos.default, aten.sin.default)))

    def made(p, node):
        a, b = node.args
        shape = list(node.meta["val"].shape)
        a, b = (x if list(x.meta["val"].shape) == shape else p.call(aten.expand.default, x, shape) for x in (a, b))
        return p.joined(a, b)

    def size(p, node):
        return p.call(aten.linalg_vector_norm.default, p.of[node.args[0]], 2, [-1])

    def angle(p, node):
        real, imaginary = p.parts(node.args[0])
        return p.call(aten.atan2.default, imaginary, real)

    def part(i):
        return lambda p, node: p.call(aten.select.int, p.of[node.args[0]], -1, i) if node.args[0] in p.of else None

    def chosen(p, node):
        where, a, b = node.args
        return p.call(aten.where.self, p.call(aten.unsqueeze.default, where, -1), p.pair(a), p.pair(b))

    def masked(p, node):
        x, mask, value = node.args
        return p.call(aten.where.self, p.call(aten.unsqueeze.default, mask, -1), p.pair(value), p.pair(x))

    def masked_in(p, node):
        return p.call(aten.copy_.default, p.of[node.args[0]], masked(p, node)) if node.args[0] in p.of else None

    def gathered(p, node):
        x, dim, index = node.args[:3]
        both = p.call(aten.expand.default, p.call(aten.unsqueeze.default, index, -1), [*index.meta["val"].shape, 2])
        return p.call(aten.gather.default, p.of[x], along(dim, rank(p, node)), both)

    def narrowed(p, node):
        # Without the axes of one element; the last axis has two.
        return p.call(aten.squeeze.default, p.of[node.args[0]])

    def dotted(p, node):
        a, b = (p.parts(x) for x in node.args)
        if a[1] is not None and node.target is aten.vdot.default:
            a = (a[0], p.call(aten.neg.default, a[1]))
        return p.call(aten.sum.dim_IntList, product(p, a, b), [0])

    def linear(p, node):
        x, weight, *bias = node.args
        pairs = [p.call(aten.mT.default, part) if part is not None else None for part in p.parts(weight)]
        found = by_parts(p, p.parts(x), pairs, lambda a, b: p.call(aten.matmul.default, a, b))
        return p.call(aten.add.Tensor, found, p.pair(bias[0])) if bias and bias[0] is not None else found

    def lengths(p, node):
        """A norm of vectors, which is that of the absolute values."""
        if node.target is aten.linalg_norm.default and node.args[1:2] not in ((), (None,)):
            return None
        return p.call(node.target, size(p, node), *node.args[1:], **{k: v for k, v in node.kwargs.items() if k != "dtype"})

    def typed(p, node):
        """From a real tensor or another complex type, or to a real one, which takes the real part."""
        dtype = node.meta["val"].dtype
        if dtype == torch.bool:
            return p.call(aten.any.dim, p.call(aten.ne.Scalar, p.pair(node.args[0]), 0), -1)
        if not dtype.is_complex:
            return p.call(aten._to_copy.default, p.call(aten.select.int, p.pair(node.args[0]), -1, 0), dtype=dtype)
        real = torch.float64 if dtype == torch.complex128 else torch.float32
        pair = p.pair(node.args[0])
        same_type = pair.meta["val"].dtype == real
        return pair if same_type and node.args[0] in p.of else p.call(aten._to_copy.default, pair, dtype=real)

    def written(p, node):
        return p.call(aten.copy_.default, p.of[node.args[0]], p.pair(node.args[1])) if node.args[0] in p.of else None

    def filled_in(p, node):
        x, value = node.args[0], node.args[1] if len(node.args) > 1 else 0
        return p.call(aten.copy_.default, p.of[x], p.pair(value)) if x in p.of else None

    def put(p, node):
        x, places, values, *rest = node.args
        return p.call(node.target, p.of[x], places, p.pair(values), *rest) if x in p.of else None

    def item(p, node):
        return p.call(operator.getitem, p.of[node.args[0]], node.args[1]) if node.args[0] in p.of else None

    rules = {
        aten.view_as_complex.default: lambda p, node: node.args[0],
        aten.view_as_real.default: itself,
        aten.polar.default: lambda p, node: polar_of(p, *node.args),
        aten.complex.default: made,
        aten.real.default: part(0),
        aten.imag.default: part(1),
        aten.abs.default: size,
        aten.angle.default: angle,
        aten.exp.default: exponential,
        aten.where.self: chosen,
        aten.where.ScalarOther: chosen,
        aten.where.ScalarSelf: chosen,
        aten.masked_fill.Scalar: masked,
        aten.masked_fill.Tensor: masked,
        aten.masked_fill_.Scalar: masked_in,
        aten.masked_fill_.Tensor: masked_in,
        aten.gather.default: gathered,
        aten.squeeze.default: narrowed,
        aten.dot.default: dotted,
        aten.vdot.default: dotted,
        aten.linear.default: linear,
        aten.linalg_norm.default: lengths,
        aten.linalg_vector_norm.default: lengths,
        aten.cumsum.default: by_axis(1),
        aten.constant_pad_nd.default: padded,
        aten.pad.default: padded,
        aten.flip.default: flipped,
        aten.roll.default: rolled,
        aten.cat.default: joined(0),
        aten.stack.default: joined(1),
        aten.permute.default: permuted,
        aten.transpose.int: exchanged,
        aten.t.default: turned,
        aten.numpy_T.default: turned,
        aten.mT.default: matrices_turned,
        aten.mH.default: turned_over,
        aten.matrix_H.default: turned_over,
        aten.adjoint.default: turned_over,
        aten.unsqueeze.default: by_axis(1, 1),
        aten.squeeze.dim: by_axis(1),
        aten.select.int: by_axis(1),
        aten.index_select.default: by_axis(1),
        aten.split.Tensor: by_axis(2),
        aten.split_with_sizes.default: by_axis(2),
        aten.chunk.default: by_axis(2),
        aten.repeat_interleave.self_int: by_axis(2),
        aten.slice.Tensor: cut,
        aten.unbind.int: cut,
        aten.flatten.using_ints: flattened,
        aten.index.Tensor: same,
        aten.neg.default: same,
        aten.detach.default: same,
        aten.detach_.default: lambda p, node: p.call(aten.detach.default, p.of[node.args[0]]),
        aten.copy_.default: written,
        aten.fill_.Scalar: filled_in,
        aten.fill_.Tensor: filled_in,
        aten.zero_.default: filled_in,
        aten.index_put.default: put,
        aten.index_put_.default: put,
        aten.mean.default: summed,
        aten.mean.dim: summed,
        aten.sum.default: summed,
        aten.sum.dim_IntList: summed,
        aten.add.Tensor: sum_of(1),
        aten.sub.Tensor: sum_of(-1),
        aten.mul.Tensor: multiplied,
        aten.div.Tensor: divided,
        aten.reciprocal.default: inverted,
        aten.square.default: raised,
        aten.pow.Tensor_Scalar: raised,
        aten.conj_physical.default: conjugate,
        aten._conj.default: conjugate,
        aten.conj.default: conjugate,
        aten.resolve_conj.default: itself,
        aten.resolve_neg.default: itself,
        aten.matmul.default: contracted(matmul),
        aten.mm.default: contracted(matmul),
        aten.bmm.default: contracted(matmul),
        aten.einsum.default: contracted(einsum),
        aten.zeros.default: filled(0.0),
        aten.ones.default: filled(1.0),
        aten.zeros_like.default: filled(0.0),
        aten.ones_like.default: filled(1.0),
        aten.new_zeros.default: filled(0.0),
        aten.full.default: filled(None),
        aten.full_like.default: filled(None),
        aten.repeat.default: repeated,
        operator.getitem: item,
    }
    for op in (aten.expand_as, aten.reshape_as, aten.view_as):
        rules[op.default] = shaped
    for op in (aten.view, aten.reshape, aten.expand):
        rules[op.default] = sized
    rules[aten.alias.default] = itself
    for op in (aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default):
        rules[op] = copied
    for op in (aten.to.dtype, aten._to_copy.default, aten.type_as.default):
        rules[op] = typed
    return rules
