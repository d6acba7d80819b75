"""Operators that torch's exporter has no ONNX form of, or none without loops, in ONNX."""


def operators(scatter_reduce, distance):
    """Their translations, by operator; given those of `scatter_reduce` and of the norm of a difference."""
    import math
    from typing import Optional, Sequence

    import torch
    from onnx_ir import DataType
    from onnxscript import opset18 as onnx
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat, TInt, TReal, TTensor

    INT64 = DataType.INT64

    def number(x, of):
        return onnx.CastLike(float(x), of)

    def numbers(*values):
        return onnx.Constant(value_ints=list(values))

    def polynomial(coefficients, x):
        """Of the coefficients of the highest power first."""
        total = number(coefficients[0], x)
        for c in coefficients[1:]:
            total = onnx.Add(onnx.Mul(total, x), number(c, x))
        return total

    def sliced(x, start, end, axis):
        return onnx.Slice(x, numbers(start), numbers(end), numbers(axis))

    def hypot(self: TFloat, other: TFloat) -> TFloat:
        return onnx.Sqrt(onnx.Add(onnx.Mul(self, self), onnx.Mul(other, other)))

    def atan2(self: TFloat, other: TFloat) -> TFloat:
        # Of the quotient that is at most 1, so that no gradient is infinite; the exporter divides by `other`.
        none, one = number(0, self), number(1, self)
        is_steep = onnx.Greater(onnx.Abs(self), onnx.Abs(other))
        small, large = onnx.Where(is_steep, other, self), onnx.Where(is_steep, self, other)
        is_origin = onnx.Equal(large, none)
        small, large = onnx.Where(is_origin, none, small), onnx.Where(is_origin, one, large)
        angle = onnx.Atan(onnx.Div(small, large))
        is_below = onnx.Less(self, none)

        def signed(value):
            return onnx.Where(is_below, number(-value, self), number(value, self))

        turn = onnx.Where(onnx.Less(other, none), signed(math.pi), none)
        return onnx.Where(is_steep, onnx.Sub(signed(math.pi / 2), angle), onnx.Add(angle, turn))

    # Where Stirling's series has the digits of f32.
    SHIFT = 7

    def shifted(x):
        """Where x < 0.5; x, or 1 - x there; where this is less than 7; and this, or 7 more there."""
        reflected = onnx.Less(x, number(0.5, x))
        y = onnx.Where(reflected, onnx.Sub(number(1, x), x), x)
        is_small = onnx.Less(y, number(SHIFT, x))
        return reflected, y, is_small, onnx.Where(is_small, onnx.Add(y, number(SHIFT, x)), y)

    def lgamma(self: TFloat) -> TFloat:
        reflected, y, is_small, z = shifted(self)
        one = number(1, self)
        inverse = onnx.Div(one, z)
        series = onnx.Mul(inverse, polynomial([1 / 1260, -1 / 360, 1 / 12], onnx.Mul(inverse, inverse)))
        main = onnx.Mul(onnx.Sub(z, number(0.5, z)), onnx.Log(z))
        stirling = onnx.Add(onnx.Sub(main, z), onnx.Add(number(math.log(2 * math.pi) / 2, z), series))
        # ln (y (y + 1) ... (y + 6)), by which the shift is undone.
        small = onnx.Where(is_small, y, one)
        rising = small
        for k in range(1, SHIFT):
            rising = onnx.Mul(rising, onnx.Add(small, number(k, small)))
        gamma = onnx.Sub(stirling, onnx.Where(is_small, onnx.Log(rising), number(0, z)))
        # ln |Γ(x) Γ(1 - x)| = ln π - ln |sin πx|, whose argument is that of the nearest whole number.
        away = onnx.Where(reflected, onnx.Sub(self, onnx.Round(self)), number(0.5, self))
        sine = onnx.Abs(onnx.Sin(onnx.Mul(away, number(math.pi, self))))
        other = onnx.Sub(number(math.log(math.pi), self), onnx.Log(sine))
        return onnx.Where(reflected, onnx.Sub(other, gamma), gamma)

    def digamma(self: TFloat) -> TFloat:
        reflected, y, is_small, z = shifted(self)
        one = number(1, self)
        inverse = onnx.Div(one, z)
        square = onnx.Mul(inverse, inverse)
        series = onnx.Mul(square, polynomial([1 / 240, -1 / 252, 1 / 120, -1 / 12], square))
        psi = onnx.Add(onnx.Sub(onnx.Log(z), onnx.Mul(inverse, number(0.5, z))), series)
        small = onnx.Where(is_small, y, one)
        undone = onnx.Div(one, small)
        for k in range(1, SHIFT):
            undone = onnx.Add(undone, onnx.Div(one, onnx.Add(small, number(k, small))))
        psi = onnx.Sub(psi, onnx.Where(is_small, undone, number(0, z)))
        away = onnx.Where(reflected, onnx.Sub(self, onnx.Round(self)), number(0.25, self))
        other = onnx.Div(number(math.pi, self), onnx.Tan(onnx.Mul(away, number(math.pi, self))))
        return onnx.Where(reflected, onnx.Sub(psi, other), psi)

    def erfinv(self: TFloat) -> TFloat:
        # Winitzki's approximation, and three of Newton's steps: their gradient is that of the inverse.
        one, two = number(1, self), number(2, self)
        a = 0.147
        log = onnx.Log(onnx.Mul(onnx.Sub(one, self), onnx.Add(one, self)))
        half = onnx.Add(number(2 / (math.pi * a), self), onnx.Div(log, two))
        root = onnx.Sqrt(onnx.Sub(onnx.Mul(half, half), onnx.Mul(log, number(1 / a, self))))
        size = onnx.Max(onnx.Sub(root, half), number(1e-30, self))
        inverse = onnx.Mul(onnx.Sign(self), onnx.Sqrt(size))
        for _ in range(3):
            error = onnx.Sub(onnx.Erf(inverse), self)
            slope = onnx.Mul(number(math.sqrt(math.pi) / 2, self), onnx.Exp(onnx.Mul(inverse, inverse)))
            inverse = onnx.Sub(inverse, onnx.Mul(error, slope))
        return inverse

    def log_ndtr(self: TFloat) -> TFloat:
        # ln erfc(z) + z² - ln t as a polynomial of t = 2 / (2 + z), fitted to 2.4e-7; the exporter's form overflows.
        size = onnx.Mul(onnx.Abs(self), number(math.sqrt(0.5), self))
        t = onnx.Div(number(2, self), onnx.Add(number(2, self), size))
        rest = polynomial(
            [
                -0.178757243, 0.991357594, -2.20510749, 2.39873372, -1.22542516, 0.335540221, -0.233707888,
                -0.0747341949, 0.0825924333, 0.375020199, 0.999999927, -1.26551212,
            ],
            t,
        )
        tail = onnx.Sub(onnx.Add(onnx.Log(t), rest), onnx.Mul(size, size))
        tail = onnx.Sub(tail, number(math.log(2), self))
        is_negative = onnx.Less(self, number(0, self))
        above = onnx.Where(is_negative, number(0, self), onnx.Exp(tail))
        return onnx.Where(is_negative, tail, onnx.Log(onnx.Sub(number(1, self), above)))

    def running(best, excluded):
        """The largest, or least, element up to each, and where the last of them is."""

        def translated(self: TReal, dim: int):
            rank = len(self.shape)
            if rank == 0:
                return onnx.Identity(self), onnx.Constant(value_int=0)
            dim %= rank
            n = self.shape[dim]
            # [..., 1, n] where [n, n] of them are not behind.
            last = [k for k in range(rank) if k != dim] + [dim]
            lines = onnx.Unsqueeze(onnx.Transpose(self, perm=last), numbers(rank - 1))
            places = onnx.Range(0, n, 1)
            seen = onnx.LessOrEqual(onnx.Unsqueeze(places, numbers(0)), onnx.Unsqueeze(places, numbers(1)))
            lines = onnx.Where(seen, lines, number(excluded, self))
            index = best(lines, axis=-1, keepdims=0, select_last_index=1)
            back = [last.index(k) for k in range(rank)]
            index = onnx.Transpose(index, perm=back)
            return onnx.GatherElements(self, index, axis=dim), index

        return translated

    def kthvalue(self: TReal, k: int, dim: int = -1, keepdim: bool = False):
        if len(self.shape) == 0:
            return onnx.Identity(self), onnx.Constant(value_int=0)
        return kthvalue_of(self, k, dim, keepdim)

    def kthvalue_of(self, k, dim, keepdim):
        least, index = onnx.TopK(self, numbers(k), axis=dim, largest=0)
        values, index = (sliced(x, k - 1, k, dim) for x in (least, index))
        if not keepdim:
            values, index = (onnx.Squeeze(x, numbers(dim)) for x in (values, index))
        return values, index

    def median_dim(self: TReal, dim: int, keepdim: bool = False):
        n = self.shape[dim] if len(self.shape) > 0 else 1
        return kthvalue(self, (n + 1) // 2, dim, keepdim)

    def median(self: TReal) -> TReal:
        n = math.prod(self.shape)
        return kthvalue_of(onnx.Reshape(self, numbers(n)), (n + 1) // 2, 0, False)[0]

    def searchsorted(
        sorted_sequence: TReal,
        self: TReal,
        out_int32: bool = False,
        right: bool = False,
        side: Optional[str] = None,
        sorter: Optional[TInt] = None,
    ) -> TInt:
        if sorter is not None:
            sorted_sequence = onnx.GatherElements(sorted_sequence, sorter, axis=-1)
        self = onnx.CastLike(self, sorted_sequence)
        rank = len(sorted_sequence.shape)
        steps = sorted_sequence if rank == 1 else onnx.Unsqueeze(sorted_sequence, numbers(-2))
        values = onnx.Unsqueeze(self, numbers(-1))
        is_right = right or side == "right"
        before = onnx.LessOrEqual(steps, values) if is_right else onnx.Less(steps, values)
        count = onnx.ReduceSum(onnx.Cast(before, to=INT64), numbers(-1), keepdims=0)
        return onnx.Cast(count, to=DataType.INT32) if out_int32 else count

    def adaptive_max_pool(self: TReal, output_size: Sequence[int]):
        rank, axes = len(self.shape), len(output_size)
        sizes = list(self.shape[rank - axes :])
        # The windows of each axis, as PyTorch divides it.
        windows = [
            [(i * n // out, -(-(i + 1) * n // out)) for i in range(out)] for n, out in zip(sizes, output_size)
        ]
        values, indices = [], []

        def visit(part, chosen):
            axis = len(chosen)
            if axis < axes:
                for start, end in windows[axis]:
                    visit(sliced(part, start, end, rank - axes + axis), [*chosen, (start, end)])
                return
            lines = onnx.Reshape(part, numbers(*[0] * (rank - axes), -1))
            best = onnx.ArgMax(lines, axis=-1, keepdims=1)
            values.append(onnx.GatherElements(lines, best, axis=-1))
            # Where it is in all of the image.
            place, rest, stride = onnx.Constant(value_int=0), best, 1
            for (start, end), n in zip(reversed(chosen), reversed(sizes)):
                width = onnx.Constant(value_int=end - start)
                at = onnx.Add(onnx.Mod(rest, width), onnx.Constant(value_int=start))
                place = onnx.Add(place, onnx.Mul(at, onnx.Constant(value_int=stride)))
                rest, stride = onnx.Div(rest, width), stride * n
            indices.append(place)

        visit(self, [])
        shape = numbers(*[0] * (rank - axes), *output_size)
        return tuple(onnx.Reshape(onnx.Concat(*parts, axis=-1), shape) for parts in (values, indices))

    def index_reduce(
        self: TReal, dim: int, index: TInt, source: TReal, reduce: str, include_self: bool = True
    ) -> TReal:
        axes = [k for k in range(len(source.shape)) if k != dim % len(source.shape)]
        index = onnx.Expand(onnx.Unsqueeze(index, numbers(*axes)) if axes else index, onnx.Shape(source))
        return scatter_reduce(self, dim, index, source, reduce, include_self)

    def pdist(self: TFloat, p: float = 2.0) -> TFloat:
        n = self.shape[0]
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
        rows = [onnx.Gather(self, numbers(*(pair[k] for pair in pairs)), axis=0) for k in (0, 1)]
        return distance(onnx.Abs(onnx.Sub(*rows)), p)

    def embedding_bag(
        weight: TFloat,
        indices: TInt,
        offsets: TInt,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: Optional[TFloat] = None,
        include_last_offset: bool = False,
        padding_idx: Optional[int] = None,
    ):
        n, bags, width = indices.shape[0], offsets.shape[0], weight.shape[1]
        if include_last_offset:
            bags -= 1
            offsets = sliced(offsets, 0, bags, 0)
        indices, offsets = (onnx.Cast(x, to=INT64) for x in (indices, offsets))
        # The bag of each index is the last that begins no later.
        places = onnx.Unsqueeze(onnx.Range(0, n, 1), numbers(1))
        begun = onnx.Cast(onnx.GreaterOrEqual(places, onnx.Unsqueeze(offsets, numbers(0))), to=INT64)
        bag = onnx.Sub(onnx.ReduceSum(begun, numbers(1), keepdims=0), onnx.Constant(value_int=1))
        rows = onnx.Gather(weight, indices)
        if per_sample_weights is not None:
            rows = onnx.Mul(rows, onnx.Unsqueeze(per_sample_weights, numbers(1)))
        kept = onnx.Expand(number(1, weight), numbers(n))
        if padding_idx is not None and padding_idx >= 0:
            is_padding = onnx.Equal(indices, onnx.Constant(value_int=padding_idx))
            kept = onnx.Where(is_padding, number(0, weight), kept)
        none = onnx.Expand(number(0, weight), numbers(bags))
        size = onnx.ScatterElements(none, bag, kept, axis=0, reduction="add")
        column = onnx.Expand(onnx.Unsqueeze(bag, numbers(1)), numbers(n, width))
        kept = onnx.Unsqueeze(kept, numbers(1))
        is_empty = onnx.Unsqueeze(onnx.Equal(size, number(0, size)), numbers(1))
        none = onnx.Expand(number(0, weight), numbers(bags, width))
        if mode == 2:
            lowest = onnx.Expand(number(-math.inf, weight), numbers(bags, width))
            rows = onnx.Where(onnx.Equal(kept, number(0, kept)), number(-math.inf, rows), rows)
            result = onnx.ScatterElements(lowest, column, rows, axis=0, reduction="max")
            result = onnx.Where(is_empty, none, result)
        else:
            result = onnx.ScatterElements(none, column, onnx.Mul(rows, kept), axis=0, reduction="add")
            if mode == 1:
                result = onnx.Div(result, onnx.Max(onnx.Unsqueeze(size, numbers(1)), number(1, size)))
        size = onnx.Cast(size, to=INT64)
        return result, bag, size, size

    def masked_select(self: TTensor, mask: TTensor):
        shape = onnx.Shape(onnx.Where(mask, self, self))
        places = onnx.Transpose(onnx.NonZero(onnx.Expand(mask, shape)), perm=[1, 0])
        return onnx.GatherND(onnx.Expand(self, shape), places)

    aten = torch.ops.aten
    found = {
        aten.atan2.default: atan2,
        aten.hypot.default: hypot,
        aten.lgamma.default: lgamma,
        aten.special_log_ndtr.default: log_ndtr,
        aten.digamma.default: digamma,
        aten.erfinv.default: erfinv,
        aten.cummax.default: running(onnx.ArgMax, -math.inf),
        aten.cummin.default: running(onnx.ArgMin, math.inf),
        aten.kthvalue.default: kthvalue,
        aten.masked_select.default: masked_select,
        aten.median.default: median,
        aten.median.dim: median_dim,
        aten.searchsorted.Tensor: searchsorted,
        aten.index_reduce.default: index_reduce,
        aten.pdist.default: pdist,
        aten._pdist_forward.default: pdist,
        aten.embedding_bag.padding_idx: embedding_bag,
        aten._embedding_bag.default: embedding_bag,
    }
    for axes in (1, 2, 3):
        found[getattr(aten, f"adaptive_max_pool{axes}d").default] = adaptive_max_pool
    return found
