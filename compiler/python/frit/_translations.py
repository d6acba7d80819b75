"""Translations of operators that the exporter writes in a form that computes something else, or that overflows."""

from frit import _images, _linalg
from frit._operators import operators


def translations():
    """A custom translation table for `torch.onnx.export`."""
    import math
    from typing import Optional, Sequence

    import torch
    from onnx_ir import DataType
    from onnxscript import opset18 as onnx
    from onnxscript.function_libs.torch_lib.ops import core, nn
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat, TInt, TReal, TTensor

    def log_sigmoid(x):
        # In place of Log(Sigmoid(x)), which is infinite where the sigmoid is 0.
        return onnx.Neg(onnx.Softplus(onnx.Neg(x)))

    def cross_entropy_loss(
        self: TFloat,
        target: TReal,
        weight: Optional[TFloat] = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> TFloat:
        rank = len(self.shape)
        axis = min(1, rank - 1)
        classes = self.shape[axis]
        shape = [1] * rank
        shape[axis] = classes
        if target.dtype.is_floating_point():
            # Probabilities, which the exporter takes for labels. A mean does not count the weights.
            if label_smoothing != 0:
                kept = onnx.Mul(target, onnx.CastLike(1.0 - label_smoothing, target))
                target = onnx.Add(kept, onnx.CastLike(label_smoothing / classes, target))
            losses = onnx.Mul(onnx.LogSoftmax(self, axis=axis), target)
            if weight is not None:
                losses = onnx.Mul(losses, onnx.Reshape(weight, shape))
            losses = onnx.Neg(onnx.ReduceSum(losses, [axis], keepdims=0))
            if reduction == 0:
                return losses
            mean = onnx.ReduceMean(losses, keepdims=0)
            return mean if reduction == 1 else onnx.ReduceSum(losses, keepdims=0)
        # The exporter drops the smoothing: a part of the label is spread over all classes.
        if label_smoothing == 0:
            return nn.aten_cross_entropy_loss(self, target, weight, reduction, ignore_index)
        is_ignored = onnx.Equal(target, onnx.CastLike(ignore_index, target))
        rows = onnx.CastLike(onnx.Not(is_ignored), self)
        index = onnx.Where(is_ignored, onnx.CastLike(0, target), target)
        logs = onnx.LogSoftmax(self, axis=axis)
        spread, kept = logs, rows
        if weight is not None:
            spread = onnx.Mul(logs, onnx.Reshape(weight, shape))
            kept = onnx.Mul(rows, onnx.Gather(weight, index))
        column = onnx.Unsqueeze(index, [axis])
        chosen = onnx.Squeeze(onnx.GatherElements(logs, column, axis=axis), [axis])
        own = onnx.Mul(chosen, onnx.CastLike(label_smoothing - 1.0, self))
        own = onnx.Mul(own, kept)
        spread = onnx.ReduceSum(spread, [axis], keepdims=0)
        spread = onnx.Mul(onnx.Mul(spread, rows), onnx.CastLike(-label_smoothing / classes, self))
        losses = onnx.Add(own, spread)
        if reduction == 0:
            return losses
        total = onnx.ReduceSum(losses, keepdims=0)
        return total if reduction == 2 else onnx.Div(total, onnx.ReduceSum(kept, keepdims=0))

    def scatter_reduce(
        self: TReal,
        dim: int,
        index: TInt,
        src: TReal,
        reduce: str,
        include_self: bool = True,
    ) -> TReal:
        # The exporter writes a mean as the last of the elements.
        if reduce != "mean":
            return core.aten_scatter_reduce(self, dim, index, src, reduce, include_self)
        if len(self.shape) == 0:
            self, index, src = (onnx.Reshape(x, [-1]) for x in (self, index, src))
        one = onnx.CastLike(1, src)
        ones = onnx.Expand(one, onnx.Shape(index))
        # Elements of src beyond the index are not read.
        part = onnx.Slice(src, [0] * len(src.shape), onnx.Shape(index), list(range(len(src.shape))))
        none = onnx.Mul(self, onnx.CastLike(0, self))
        count = onnx.ScatterElements(none, index, ones, axis=dim, reduction="add")
        if include_self:
            total = onnx.ScatterElements(self, index, part, axis=dim, reduction="add")
            mean = onnx.Div(total, onnx.Add(count, one))
        else:
            total = onnx.ScatterElements(none, index, part, axis=dim, reduction="add")
            mean = onnx.Div(total, onnx.Max(count, one))
        return onnx.Where(onnx.Greater(count, onnx.CastLike(0, count)), mean, self)

    def floats(dtype, *numbers):
        """Whether these numbers, which are known, make a range of floats."""
        known = all(isinstance(x, (int, float)) for x in numbers)
        given = dtype not in (-1, None)
        return known and (DataType(dtype).is_floating_point() if given else any(isinstance(x, float) for x in numbers))

    def arange(start, end, step, dtype):
        # The exporter counts in f32, or writes numbers of several types into one range.
        places = onnx.Range(0, max(0, math.ceil((end - start) / step)), 1)
        places = onnx.Cast(places, to=DataType.FLOAT if dtype in (-1, None) else dtype)
        return onnx.Add(onnx.Mul(places, onnx.CastLike(step, places)), onnx.CastLike(start, places))

    def arange_end(
        end: float, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False
    ) -> TTensor:
        if floats(dtype, end):
            return arange(0, end, 1, dtype)
        return core.aten_arange(end, dtype, layout, device, pin_memory)

    def arange_start(
        start: float,
        end: float,
        dtype: int = -1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
    ) -> TTensor:
        if floats(dtype, start, end):
            return arange(start, end, 1, dtype)
        return core.aten_arange_start(start, end, dtype, layout, device, pin_memory)

    def arange_start_step(
        start: float,
        end: float,
        step: float = 1,
        dtype: int = -1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
    ) -> TTensor:
        if floats(dtype, start, end, step):
            return arange(start, end, step, dtype)
        return core.aten_arange_start_step(start, end, step, dtype, layout, device, pin_memory)

    def squeeze(self: TTensor, dim: int) -> TTensor:
        # PyTorch leaves an axis of another size as it is.
        if len(self.shape) == 0 or self.shape[dim] != 1:
            return onnx.Identity(self)
        return onnx.Squeeze(self, [dim])

    def root(total, p):
        # The gradient is 0 where the distance is.
        one, none = onnx.CastLike(1, total), onnx.CastLike(0, total)
        is_none = onnx.Equal(total, none)
        safe = onnx.Where(is_none, one, total)
        power = onnx.Sqrt(safe) if p == 2 else onnx.Pow(safe, onnx.CastLike(1 / p, total))
        return onnx.Where(is_none, none, power)

    def deviation(x, dims, correction, keepdim):
        """The standard deviation and the mean, over all axes if there are none."""
        rank = len(x.shape)
        dims = list(range(rank)) if not dims else [d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)]
        if rank == 0:
            x, dims, keepdim = onnx.Reshape(x, [1]), [0], False
        mean = onnx.ReduceMean(x, dims, keepdims=1)
        away = onnx.Sub(x, mean)
        sizes = onnx.Gather(onnx.Shape(x), onnx.Constant(value_ints=dims))
        count = onnx.CastLike(onnx.ReduceProd(sizes, keepdims=0), x)
        count = onnx.Sub(count, onnx.CastLike(1.0 if correction is None else float(correction), x))
        total = onnx.ReduceSum(onnx.Mul(away, away), dims, keepdims=int(keepdim))
        found = root(onnx.Div(total, count), 2)
        return found, mean if keepdim else onnx.Squeeze(mean, dims)

    def std(self: TFloat, unbiased: bool = True) -> TFloat:
        return deviation(self, None, int(unbiased), False)[0]

    def std_dim(self: TFloat, dim: Optional[Sequence[int]], unbiased: bool = True, keepdim: bool = False) -> TFloat:
        return deviation(self, dim, int(unbiased), keepdim)[0]

    def std_correction(
        self: TFloat, dim: Optional[Sequence[int]] = None, correction: Optional[float] = None, keepdim: bool = False
    ) -> TFloat:
        return deviation(self, dim, correction, keepdim)[0]

    def std_mean_correction(
        self: TFloat, dim: Optional[Sequence[int]] = None, correction: Optional[float] = None, keepdim: bool = False
    ):
        return deviation(self, dim, correction, keepdim)

    def distance(size, p):
        """The norm, over the last axis, of what has these sizes."""
        if p in (1, float("inf")):
            reduced = onnx.ReduceSum if p == 1 else onnx.ReduceMax
            return reduced(size, [-1], keepdims=0)
        one, none = onnx.CastLike(1, size), onnx.CastLike(0, size)
        is_none = onnx.Equal(size, none)
        power = onnx.Pow(onnx.Where(is_none, one, size), onnx.CastLike(p, size))
        return root(onnx.ReduceSum(onnx.Where(is_none, none, power), [-1], keepdims=0), p)

    def cdist(x1: TFloat, x2: TFloat, p: float, compute_mode: Optional[int] = None) -> TFloat:
        many = any(not isinstance(x.shape[-2], int) or x.shape[-2] > 25 for x in (x1, x2))
        if p == 2 and (compute_mode == 1 or (many and compute_mode != 2)):
            # As PyTorch computes many of them, by a product of matrices.
            squares = [onnx.ReduceSum(onnx.Mul(x, x), [-1], keepdims=1) for x in (x1, x2)]
            order = list(range(len(x2.shape)))
            order[-2:] = reversed(order[-2:])
            x2, squares[1] = onnx.Transpose(x2, perm=order), onnx.Transpose(squares[1], perm=order)
            product = onnx.Mul(onnx.MatMul(x1, x2), onnx.CastLike(-2, x1))
            total = onnx.Max(onnx.Add(onnx.Add(*squares), product), onnx.CastLike(0, product))
        else:
            return distance(onnx.Abs(onnx.Sub(onnx.Unsqueeze(x1, [-2]), onnx.Unsqueeze(x2, [-3]))), p)
        return root(total, p)

    def scaled_dot_product_attention(
        query: TFloat,
        key: TFloat,
        value: TFloat,
        attn_mask: Optional[TTensor] = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Optional[float] = None,
        enable_gqa: bool = False,
    ) -> TFloat:
        if attn_mask is None or attn_mask.dtype != DataType.BOOL or len(query.shape) != 4:
            return nn.aten_scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        # A row without keys is 0. The exporter masks by the least number, with which it is the mean of the values.
        if enable_gqa and query.shape[1] != key.shape[1]:
            key, value = nn._attention_repeat_kv_for_group_query(query, key, value)
        root = onnx.CastLike((query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5, query)
        keys = onnx.Mul(onnx.Transpose(key, perm=[0, 1, 3, 2]), root)
        zero, lowest = onnx.CastLike(0, query), onnx.CastLike(float("-inf"), query)
        mask = onnx.Where(attn_mask, zero, lowest)
        weights = onnx.Softmax(onnx.Add(onnx.MatMul(onnx.Mul(query, root), keys), mask), axis=-1)
        weights = onnx.Where(onnx.IsNaN(weights), zero, weights)
        if dropout_p != 0:
            weights, _ = onnx.Dropout(weights, dropout_p)
        return onnx.MatMul(weights, value)

    aten = torch.ops.aten
    return operators(scatter_reduce, distance) | _linalg.operators() | _images.operators() | {
        aten.log_sigmoid.default: log_sigmoid,
        aten.cross_entropy_loss.default: cross_entropy_loss,
        aten.arange.default: arange_end,
        aten.arange.start: arange_start,
        aten.arange.start_step: arange_start_step,
        aten.scatter_reduce.two: scatter_reduce,
        aten.squeeze.dim: squeeze,
        aten.std.correction: std_correction,
        aten.std.default: std,
        aten.std.dim: std_dim,
        aten.std_mean.correction: std_mean_correction,
        aten._cdist_forward.default: cdist,
        aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
    }
