"""Translations of operators that the exporter writes in a form that computes something else, or that overflows."""


def translations():
    """A custom translation table for `torch.onnx.export`."""
    from typing import Optional

    import torch
    from onnxscript import opset18 as onnx
    from onnxscript.function_libs.torch_lib.ops import core, nn
    from onnxscript.function_libs.torch_lib.tensor_typing import IntType, TFloat, TInt, TReal, TTensor

    def log_sigmoid(x):
        # In place of Log(Sigmoid(x)), which is infinite where the sigmoid is 0.
        return onnx.Neg(onnx.Softplus(onnx.Neg(x)))

    def cross_entropy_loss(
        self: TFloat,
        target: IntType,
        weight: Optional[TFloat] = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> TFloat:
        # The exporter drops the smoothing: a part of the label is spread over all classes.
        if label_smoothing == 0:
            return nn.aten_cross_entropy_loss(self, target, weight, reduction, ignore_index)
        rank = len(self.shape)
        axis = min(1, rank - 1)
        classes = self.shape[axis]
        is_ignored = onnx.Equal(target, onnx.CastLike(ignore_index, target))
        rows = onnx.CastLike(onnx.Not(is_ignored), self)
        index = onnx.Where(is_ignored, onnx.CastLike(0, target), target)
        logs = onnx.LogSoftmax(self, axis=axis)
        spread, kept = logs, rows
        if weight is not None:
            shape = [1] * rank
            shape[axis] = classes
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

    def squeeze(self: TTensor, dim: int) -> TTensor:
        # PyTorch leaves an axis of another size as it is.
        if len(self.shape) == 0 or self.shape[dim] != 1:
            return onnx.Identity(self)
        return onnx.Squeeze(self, [dim])

    aten = torch.ops.aten
    return {
        aten.log_sigmoid.default: log_sigmoid,
        aten.cross_entropy_loss.default: cross_entropy_loss,
        aten.scatter_reduce.two: scatter_reduce,
        aten.squeeze.dim: squeeze,
    }
