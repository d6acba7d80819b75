// Folding of images with few channels, so that a convolution with strides becomes one of stride 1 over more channels.
//
// Image x[N, C, size] becomes y[N, folded, P]: channel c at the place `step`·o + b is channel c·STEPS + b at place o, where
// STEPS is the product of `step`, and b counts the places of a step, the last axis fastest. The P - C·STEPS channels behind
// are zero, as are places outside of x. Kernels w[M, C, taps] become w'[M, folded taps, P] alike: tap t is at a = ⌊(t - low)
// / step⌋ + shift, b = (t - low) mod step, so that tap a slides over `folded` with `shift` places of padding before it.
//
// To be defined: T, the elements; RANK, the number of spatial axes; C; P, a multiple of WIDTH; WIDTH, the elements of an
// access; lists with a number per axis: SIZE and FOLDED, of places for `fold_images`, of taps for the others; STEP, LOW and
// SHIFT.

typedef Pack<T, WIDTH> Many;

__device__ constexpr i32 size[RANK] = {SIZE}, folded[RANK] = {FOLDED}, step[RANK] = {STEP}, low[RANK] = {LOW},
                         shift[RANK] = {SHIFT};

__device__ constexpr i32 product(const i32 (&sizes)[RANK]) {
    i32 n = 1;
    for (int axis = 0; axis < RANK; axis++) n *= sizes[axis];
    return n;
}
const i32 STEPS = product(step), PLACES = product(size), ROWS = product(folded);

// The offset of the element of channel c·STEPS + b at place (or tap) `row` in its channel; -1 if there is none. `OF_TAPS`:
// of kernels.
template <bool OF_TAPS> __device__ __forceinline__ i32 element(i32 row, i32 b) {
    i32 at = 0, scale = 1;
#pragma unroll
    for (int axis = RANK - 1; axis >= 0; axis--) {
        i32 next = row / folded[axis], o = row - next * folded[axis];
        i32 outer = b / step[axis], inner = b - outer * step[axis];
        i32 x = o * step[axis] + inner;
        if (OF_TAPS) x += low[axis] - shift[axis] * step[axis];
        if (x < 0 || x >= size[axis]) return -1;
        at += x * scale;
        scale *= size[axis];
        row = next;
        b = outer;
    }
    return at;
}

// `n` images or filters.
template <bool OF_TAPS> __device__ __forceinline__ void fold(T* y, const T* x, i64 n) {
    const i32 CHUNKS = P / WIDTH;
    bool whole = aligned(y, sizeof(Many));
    for (i64 i = global_thread(); i < n * ROWS * CHUNKS; i += global_threads()) {
        i64 image = i / (ROWS * CHUNKS);
        i32 rest = i32(i - image * (ROWS * CHUNKS)), row = rest / CHUNKS, first = (rest - row * CHUNKS) * WIDTH;
        Many all;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            i32 c = (first + j) / STEPS, at = c < C ? element<OF_TAPS>(row, first + j - c * STEPS) : -1;
            T zero = {};
            all.at[j] = zero;
            if (at >= 0) all.at[j] = x[(image * C + c) * PLACES + at];
        }
        move<T>(reinterpret_cast<Many*>(y) + i, &all, whole);
    }
}

extern "C" __global__ void fold_images(T* y, const T* x, i64 images) { fold<false>(y, x, images); }
extern "C" __global__ void fold_kernels(T* y, const T* w, i64 filters) { fold<true>(y, w, filters); }

// The inverse of `fold_kernels`, for their gradients.
extern "C" __global__ void unfold_kernels(T* w, const T* y, i64 filters) {
    for (i64 i = global_thread(); i < filters * C * PLACES; i += global_threads()) {
        i64 filter = i / (C * PLACES);
        i32 rest = i32(i - filter * (C * PLACES)), c = rest / PLACES, tap = rest - c * PLACES;
        i32 row = 0, b = 0, rows = 1, steps = 1;
#pragma unroll
        for (int axis = RANK - 1; axis >= 0; axis--) {
            i32 next = tap / size[axis], t = tap - next * size[axis];
            i32 q = t - low[axis] + shift[axis] * step[axis], a = q / step[axis];
            row += a * rows;
            b += (q - a * step[axis]) * steps;
            rows *= folded[axis];
            steps *= step[axis];
            tap = next;
        }
        w[i] = y[(filter * ROWS + row) * P + c * STEPS + b];
    }
}
