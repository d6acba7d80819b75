// Convolution by im2col and GEMM, and directly for many groups.
//
// The columns of an image are the elements under the taps: columns[c·taps + t][position]. With them y = w · columns, dw
// = dy · columnsᵀ and dx is col2im of wᵀ · dy (`from_columns`).
//
// To be defined: T, the elements of operands; OUT, of results; RANK, the number of spatial axes.

#include "window.cuh"

typedef Number<T>::Wide Value;

// Columns of `images` images of `channels` channels: a row has all positions of an image, or, with `row` > positions,
// those of all images in sequence.
extern "C" __global__ void to_columns(T* columns, const T* x, Window w, i64 images, i64 channels, i64 image_step,
                                      i64 row_step) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    i64 n = images * channels * taps * positions;
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        i64 p = i % positions, row = i / positions % (channels * taps), image = i / (positions * channels * taps);
        i64 c = row / taps, position[RANK], tap[RANK];
        Window::split(p, w.output, position);
        Window::split(row - c * taps, w.taps, tap);
        i64 at = w.element(position, tap);
        T zero = {};
        columns[image * image_step + row * row_step + p] = at < 0 ? zero : x[(image * channels + c) * size + at];
    }
}

// dx[image, c] by col2im; the columns of an image are contiguous.
extern "C" __global__ void from_columns(OUT* dx, const Value* columns, Window w, i64 images, i64 channels) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    for (i64 i = global_thread(); i < images * channels * size; i += global_threads()) {
        i64 plane = i / size, element[RANK], tap[RANK];
        Window::split(i - plane * size, w.input, element);
        Value sum = 0;
        for (i64 t = 0; t < taps; t++) {
            Window::split(t, w.taps, tap);
            i64 at = w.position(element, tap);
            if (at >= 0) sum += columns[(plane * taps + t) * positions + at];
        }
        dx[i] = to(sum, OUT());
    }
}

// Direct convolution: w[filters, channels / groups, taps].
extern "C" __global__ void conv_direct(OUT* y, const T* x, const T* weight, Window w, i64 images, i64 channels,
                                       i64 filters, i64 groups) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    i64 per_group = channels / groups, filters_per_group = filters / groups;
    for (i64 i = global_thread(); i < images * filters * positions; i += global_threads()) {
        i64 image = i / (filters * positions), m = i / positions % filters, position[RANK], tap[RANK];
        Window::split(i % positions, w.output, position);
        Value sum = 0;
        for (i64 t = 0; t < taps; t++) {
            Window::split(t, w.taps, tap);
            i64 at = w.element(position, tap);
            if (at < 0) continue;
            for (i64 c = 0; c < per_group; c++) {
                i64 channel = m / filters_per_group * per_group + c;
                sum += widen(x[(image * channels + channel) * size + at]) * widen(weight[(m * per_group + c) * taps + t]);
            }
        }
        y[i] = to(sum, OUT());
    }
}

extern "C" __global__ void conv_direct_grad_input(OUT* dx, const T* dy, const T* weight, Window w, i64 images,
                                                  i64 channels, i64 filters, i64 groups) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    i64 per_group = channels / groups, filters_per_group = filters / groups;
    for (i64 i = global_thread(); i < images * channels * size; i += global_threads()) {
        i64 image = i / (channels * size), channel = i / size % channels, element[RANK], tap[RANK];
        Window::split(i % size, w.input, element);
        i64 group = channel / per_group, c = channel - group * per_group;
        Value sum = 0;
        for (i64 t = 0; t < taps; t++) {
            Window::split(t, w.taps, tap);
            i64 at = w.position(element, tap);
            if (at < 0) continue;
            for (i64 m = group * filters_per_group; m < (group + 1) * filters_per_group; m++)
                sum += widen(dy[(image * filters + m) * positions + at]) * widen(weight[(m * per_group + c) * taps + t]);
        }
        dx[i] = to(sum, OUT());
    }
}

// One block per element of dw.
extern "C" __global__ void conv_direct_grad_weight(OUT* dw, const T* dy, const T* x, Window w, i64 images,
                                                   i64 channels, i64 filters, i64 groups) {
    __shared__ Value sums[32];
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    i64 per_group = channels / groups, filters_per_group = filters / groups;
    for (i64 i = blockIdx.x; i < filters * per_group * taps; i += gridDim.x) {
        i64 m = i / (per_group * taps), c = i / taps % per_group, position[RANK], tap[RANK];
        i64 channel = m / filters_per_group * per_group + c;
        Window::split(i % taps, w.taps, tap);
        Value sum = 0;
        for (i64 j = threadIdx.x; j < images * positions; j += blockDim.x) {
            i64 image = j / positions, p = j - image * positions;
            Window::split(p, w.output, position);
            i64 at = w.element(position, tap);
            if (at < 0) continue;
            sum += widen(dy[(image * filters + m) * positions + p]) * widen(x[(image * channels + channel) * size + at]);
        }
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        __syncthreads();
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            Value total = 0;
            for (int warp = 0; warp < int(blockDim.x) / 32; warp++) total += sums[warp];
            dw[i] = to(total, OUT());
        }
    }
}
