"""Translations of pooling and resizing that the exporter writes in a form that computes something else."""


def operators():
    """The translations, by operator."""
    import math
    from typing import Optional, Sequence

    import torch
    from onnxscript import opset18 as onnx
    from onnxscript.function_libs.torch_lib.ops import nn
    from onnxscript.function_libs.torch_lib.tensor_typing import TFloat, TReal

    def average(axes):
        """Averages of windows over the last `axes` axes."""
        plain = getattr(nn, f"aten_avg_pool{axes}d")

        def each(values, default):
            values = [values] if isinstance(values, int) else list(values or [])
            return values * axes if len(values) == 1 else values or default

        def translated(
            self: TFloat,
            kernel_size: Sequence[int],
            stride: Sequence[int] = (),
            padding: Sequence[int] = 0,
            ceil_mode: bool = False,
            count_include_pad: bool = True,
            divisor_override: Optional[int] = None,
        ) -> TFloat:
            if divisor_override is None:
                return plain(self, kernel_size, stride, padding, ceil_mode, count_include_pad)
            # The exporter drops the divisor. Zeros around the image make all windows whole.
            kernel = each(kernel_size, None)
            strides, before = each(stride, kernel), each(padding, [0] * axes)
            after = list(before)
            if ceil_mode:
                for i, size in enumerate(self.shape[-axes:]):
                    windows = math.ceil((size + 2 * before[i] - kernel[i]) / strides[i]) + 1
                    # The last window begins in the image or before it.
                    windows -= (windows - 1) * strides[i] >= size + before[i]
                    after[i] = max(0, (windows - 1) * strides[i] + kernel[i] - size - before[i])
            front = [0] * (len(self.shape) - axes)
            wide = onnx.Pad(self, front + before + front + after, onnx.CastLike(0.0, self))
            if len(front) == 1:
                wide = onnx.Unsqueeze(wide, [0])
            mean = onnx.AveragePool(wide, kernel_shape=kernel, strides=strides)
            if len(front) == 1:
                mean = onnx.Squeeze(mean, [0])
            return onnx.Mul(mean, onnx.CastLike(math.prod(kernel) / divisor_override, mean))

        return translated

    def by_sizes(size, factors, image, aligned):
        """Size and factors of a result: the size alone, which the exporter computes in f32, where factors give it in whole numbers.
        Corners are aligned by sizes, not by factors."""
        if factors is None:
            return size, factors
        exact = [n * factor for n, factor in zip(image, factors)]
        if not aligned and any(abs(n - round(n)) >= 1e-9 * n for n in exact):
            return size, factors
        return onnx.Constant(value_ints=[math.floor(n + 1e-9) for n in exact]), None

    def resized(plain):
        def translated(
            self: TReal,
            output_size: Optional[Sequence[int]],
            align_corners: bool,
            scale_factors: Optional[Sequence[float]] = None,
        ) -> TReal:
            size, factors = by_sizes(output_size, scale_factors, self.shape[2:], align_corners)
            return plain(self, size, align_corners, factors)

        return translated

    def nearest(
        input: TReal,
        output_size: Optional[Sequence[int]] = None,
        scale_factors: Optional[Sequence[float]] = None,
    ) -> TReal:
        size, factors = by_sizes(output_size, scale_factors, input.shape[2:], False)
        return nn.aten_upsample_nearestnd_vec(input, size, factors)

    aten = torch.ops.aten
    return {
        aten.avg_pool2d.default: average(2),
        aten.avg_pool3d.default: average(3),
        aten.upsample_bicubic2d.vec: resized(nn.aten_upsample_bicubic2d_vec),
        aten.upsample_bilinear2d.vec: resized(nn.aten_upsample_bilinear2d_vec),
        aten.upsample_nearest1d.vec: nearest,
        aten.upsample_nearest2d.vec: nearest,
        aten.upsample_nearest3d.vec: nearest,
        aten.upsample_trilinear3d.vec: resized(nn.aten_upsample_trilinear3d_vec),
    }
