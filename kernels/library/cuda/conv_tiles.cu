// Implicit-GEMM convolution on tensor cores: tiles are gathered from the images, so that no columns are stored in
// memory.
//
// A block computes TILE_M × N elements of the result, STEP contracted ones at a time: the next step's elements are
// loaded to registers while tensor cores process the tiles in shared memory. Eight warps, two by four, compute 32
// columns each.
//
// To be defined: T (f16 or bf16), the elements of operands; OUT, of results; RANK, the number of spatial axes; TILE_M
// (64 or 128), the rows of a block; BACKWARD (0 or 1), whether `conv_tiles` computes the gradient of the images; UNIT,
// whether all strides are 1.

#include "window.cuh"
#include "tensor_cores.cuh"

const int N = 128, STEP = 32, THREADS = 256, WARP_N = 32, WARP_M = TILE_M / 2;
// Row lengths in shared memory: of tiles with the contracted axis innermost, and of those with it outermost.
const int INSIDE = STEP + PAD, OUTSIDE = N + PAD;
// Elements of either tile that a thread moves per step.
const int OF_M = TILE_M * STEP / THREADS, OF_N = N * STEP / THREADS;

// Offset of a channel under a tap, or of a position, within an image.
struct Place {
    int base;
    int at[RANK];
};

// A channel under a tap: offsets to the positions that read it. `base` is -1 if there is none.
__device__ __forceinline__ Place term(const Window& w, u32 index, u32 n, u32 taps, u32 size) {
    Place p = {-1, {}};
    if (index >= n) return p;
    u32 channel = index / taps, tap = index - channel * taps;
    p.base = int(channel * size);
    for (int i = RANK - 1; i >= 0; i--) {
        u32 next = tap / u32(w.taps[i]);
        p.at[i] = int(tap - next * u32(w.taps[i])) * int(w.dilations[i]);
        tap = next;
    }
    return p;
}

// The parts of the result that a block and a warp compute.
struct Share {
    u32 row, column, group, split;
    int warp_row, warp_column;

    __device__ __forceinline__ Share(i64 m, u32 columns, i64 groups) {
        u32 tiles_m = u32(m + TILE_M - 1) / TILE_M, tiles_n = (columns + N - 1) / N;
        u32 outer = blockIdx.x / tiles_m / tiles_n;
        row = blockIdx.x % tiles_m * TILE_M, column = blockIdx.x / tiles_m % tiles_n * N;
        group = outer % u32(groups), split = outer / u32(groups);
        int warp = threadIdx.x / 32;
        warp_row = warp / 4 * WARP_M, warp_column = warp % 4 * WARP_N;
    }
};

// The accumulators of a warp, and the operands of a step.
struct Sums {
    f32 of[WARP_M / 16][WARP_N / 8][4];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) of[i][j][e] = 0;
    }

    // `left` is [TILE_M][STEP]; `right` [STEP][N], or [N][STEP] if the contracted axis is inside.
    template <bool IS_INSIDE> __device__ __forceinline__ void add(const T* left, const T* right, const Share& share) {
        int lane = threadIdx.x % 32, row = share.warp_row, column = share.warp_column;
        // Operands of one MMA step of 16 at a time: those of the next would not fit the registers.
#pragma unroll 1
        for (int k = 0; k < STEP; k += 16) {
            u32 a[WARP_M / 16][4];
#pragma unroll
            for (int i = 0; i < WARP_M / 16; i++)
                ldmatrix(a[i], left + (row + i * 16 + lane % 16) * INSIDE + k + lane / 16 * 8);
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j += 2) {
                u32 b[4];
                int from = column + j * 8;
                if (IS_INSIDE)
                    ldmatrix(b, right + (from + lane / 16 * 8 + lane % 8) * INSIDE + k + lane / 8 % 2 * 8);
                else
                    ldmatrix_transposed(b, right + (k + lane % 16) * OUTSIDE + from + lane / 16 * 8);
#pragma unroll
                for (int i = 0; i < WARP_M / 16; i++) {
                    mma(of[i][j], a[i], b[0], b[1], T());
                    mma(of[i][j + 1], a[i], b[2], b[3], T());
                }
            }
        }
    }
};

// Eight elements of a row, zeros beyond its end; one access if `whole`.
__device__ __forceinline__ Pack<T, 8> eight(const T* row, u32 at, u32 length, bool whole) {
    Pack<T, 8> all;
    if (whole && at < length) return *reinterpret_cast<const Pack<T, 8>*>(row + at);
#pragma unroll
    for (int i = 0; i < 8; i++) all.at[i] = at + i < length ? row[at + i] : T{0};
    return all;
}

// y[images, groups · m, positions] from w[groups, m, c · taps] and x[images, groups · c, size]; or dx, which has the shape of x
// then, from the transposed w[groups, m = channels, c = filters, taps] and dy.
extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_tiles(OUT* to_images, const T* weights, const T* images,
                                                                 Window w, i64 n_images, i64 groups, i64 m, i64 c) {
    __align__(16) __shared__ T left[2][TILE_M * INSIDE], right[2][STEP * OUTSIDE];
    __shared__ Place terms[2][STEP];
    const i64* from_sizes = BACKWARD ? w.output : w.input;
    const i64* to_sizes = BACKWARD ? w.input : w.output;
    u32 taps = u32(Window::product(w.taps)), contracted = u32(c) * taps;
    u32 size = u32(Window::product(from_sizes)), positions = u32(Window::product(to_sizes));
    u32 columns = u32(n_images) * positions;
    Share share(m, columns, groups);
    u32 row0 = share.row, column0 = share.column, group = share.group;
    const T* rows = weights + i64(group) * m * contracted;
    bool whole = contracted % 8 == 0 && aligned(weights, 16);

    // A thread gathers one column; a warp gathers one contracted element of 32 columns at a time.
    u32 column = column0 + threadIdx.x % N;
    bool exists = column < columns;
    u32 image = exists ? column / positions : 0, index = exists ? column - image * positions : 0;
    u32 from = (image * u32(groups) + group) * u32(c) * size;
    int origin[RANK];
#pragma unroll
    for (int i = RANK - 1; i >= 0; i--) {
        u32 next = index / u32(to_sizes[i]), at = index - next * u32(to_sizes[i]);
        origin[i] = BACKWARD ? int(at) + int(w.low[i]) : int(at) * int(w.strides[i]) - int(w.low[i]);
        index = next;
    }
    // A column beyond the end reads nothing.
    if (!exists) origin[0] = -(1 << 30);
    Pack<T, 8> of_m[OF_M / 8];
    // Two elements per register.
    u32 of_n[OF_N / 2];
    auto fetch = [&](u32 k0, const Place* now) {
#pragma unroll
        for (int i = 0; i < OF_M / 8; i++) {
            int chunk = threadIdx.x + i * THREADS;
            u32 row = row0 + chunk / (STEP / 8);
            u32 length = row < m ? contracted : 0;
            of_m[i] = eight(rows + row * contracted, k0 + chunk % (STEP / 8) * 8, length, whole);
        }
#pragma unroll
        for (int i = 0; i < OF_N; i++) {
            Place term = now[threadIdx.x / N + i * (THREADS / N)];
            bool meets = term.base >= 0;
            int at = 0;
#pragma unroll
            for (int axis = 0; axis < RANK; axis++) {
                int x = BACKWARD ? origin[axis] - term.at[axis] : origin[axis] + term.at[axis];
                if (BACKWARD && !UNIT) {
                    int stride = int(w.strides[axis]);
                    meets = meets && x >= 0 && x % stride == 0;
                    x /= stride;
                }
                meets = meets && x >= 0 && x < int(from_sizes[axis]);
                at = at * int(from_sizes[axis]) + x;
            }
            u32 bits = meets ? images[from + u32(term.base + at)].bits : 0;
            of_n[i / 2] = i % 2 == 0 ? bits : of_n[i / 2] | bits << 16;
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < OF_M / 8; i++) {
            int chunk = threadIdx.x + i * THREADS;
            T* to = left[buffer] + chunk / (STEP / 8) * INSIDE + chunk % (STEP / 8) * 8;
            *reinterpret_cast<Pack<T, 8>*>(to) = of_m[i];
        }
#pragma unroll
        for (int i = 0; i < OF_N; i++)
            right[buffer][(threadIdx.x / N + i * (THREADS / N)) * OUTSIDE + threadIdx.x % N] =
                T{u16(of_n[i / 2] >> i % 2 * 16)};
    };

    Sums sums;
    if (threadIdx.x < STEP) terms[0][threadIdx.x] = term(w, threadIdx.x, contracted, taps, size);
    __syncthreads();
    fetch(0, terms[0]);
    for (u32 k0 = 0; k0 < contracted; k0 += STEP) {
        int buffer = k0 / STEP % 2;
        put(buffer);
        u32 next = k0 + STEP;
        if (threadIdx.x < STEP) terms[1 - buffer][threadIdx.x] = term(w, next + threadIdx.x, contracted, taps, size);
        __syncthreads();
        if (next < contracted) fetch(next, terms[1 - buffer]);
        sums.add<false>(left[buffer], right[buffer], share);
    }

    // Two columns of a lane are contiguous in memory where rows have an even number of positions.
    bool pairs = sizeof(OUT) == 2 && positions % 2 == 0 && aligned(to_images, 4);
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            u32 at = column0 + share.warp_column + j * 8 + lane % 4 * 2 + e;
            if (at >= columns || (pairs && e == 1)) continue;
            u32 image = at / positions;
            OUT* to_image = to_images + (i64(image) * groups + group) * m * positions + (at - image * positions);
#pragma unroll
            for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 row = row0 + share.warp_row + i * 16 + half * 8 + lane / 4;
                    if (row >= m) continue;
                    f32 x = sums.of[i][j][half * 2 + e];
                    OUT* to_place = to_image + i64(row) * positions;
                    if (pairs) {
                        Pack<OUT, 2> both = {{to(x, OUT()), to(sums.of[i][j][half * 2 + 1], OUT())}};
                        *reinterpret_cast<Pack<OUT, 2>*>(to_place) = both;
                    } else {
                        *to_place = to(x, OUT());
                    }
                }
        }
}

// dw[groups, m, c · taps], as partial sums over `splits` parts of the positions of all images, from dy[images, groups ·
// m, positions] and x[images, groups · c, size].
extern "C" __global__ void __launch_bounds__(THREADS, 2) conv_tiles_grad_weight(OUT* dw, const T* dy, const T* x, Window w,
                                                                             i64 n_images, i64 groups, i64 m, i64 c,
                                                                             i64 splits) {
    __align__(16) __shared__ T left[2][TILE_M * INSIDE], right[2][N * INSIDE];
    __shared__ Place terms[N];
    u32 taps = u32(Window::product(w.taps)), columns = u32(c) * taps;
    u32 size = u32(Window::product(w.input)), positions = u32(Window::product(w.output));
    u32 contracted = u32(n_images) * positions;
    Share share(m, columns, groups);
    u32 row0 = share.row, column0 = share.column, group = share.group, split = share.split;
    u32 all_steps = (contracted + STEP - 1) / STEP, steps = (all_steps + u32(splits) - 1) / u32(splits);
    u32 first = split * steps, last = first + steps < all_steps ? first + steps : all_steps;

    // A warp gathers 32 contracted elements of one row or column at a time.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T of_m[OF_M], of_n[OF_N];
    auto fetch = [&](u32 k0) {
        u32 k = k0 + lane;
        bool exists = k < contracted;
        u32 image = exists ? k / positions : 0, position = exists ? k - image * positions : 0, index = position;
        const T* gradient = dy + ((i64(image) * groups + group) * m + row0) * positions + position;
        const T* from = x + (i64(image) * groups + group) * c * size;
        int origin[RANK];
#pragma unroll
        for (int i = RANK - 1; i >= 0; i--) {
            u32 next = index / u32(w.output[i]);
            origin[i] = int(index - next * u32(w.output[i])) * int(w.strides[i]) - int(w.low[i]);
            index = next;
        }
#pragma unroll
        for (int i = 0; i < OF_M; i++) {
            u32 row = warp + i * (THREADS / 32);
            of_m[i] = exists && row0 + row < m ? gradient[i64(row) * positions] : T{0};
        }
#pragma unroll
        for (int i = 0; i < OF_N; i++) {
            Place term = terms[warp + i * (THREADS / 32)];
            bool meets = exists && term.base >= 0;
            int at = 0;
#pragma unroll
            for (int axis = 0; axis < RANK; axis++) {
                int x = origin[axis] + term.at[axis];
                meets = meets && x >= 0 && x < int(w.input[axis]);
                at = at * int(w.input[axis]) + x;
            }
            of_n[i] = meets ? from[term.base + at] : T{0};
        }
    };
    auto put = [&](int buffer) {
#pragma unroll
        for (int i = 0; i < OF_M; i++) left[buffer][(warp + i * (THREADS / 32)) * INSIDE + lane] = of_m[i];
#pragma unroll
        for (int i = 0; i < OF_N; i++) right[buffer][(warp + i * (THREADS / 32)) * INSIDE + lane] = of_n[i];
    };

    Sums sums;
    if (threadIdx.x < N) terms[threadIdx.x] = term(w, column0 + threadIdx.x, columns, taps, size);
    __syncthreads();
    if (first < last) fetch(first * STEP);
    for (u32 step = first; step < last; step++) {
        int buffer = step % 2;
        put(buffer);
        __syncthreads();
        if (step + 1 < last) fetch((step + 1) * STEP);
        sums.add<true>(left[buffer], right[buffer], share);
    }
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = row0 + share.warp_row + i * 16 + half * 8 + lane / 4;
            if (row >= m) continue;
            OUT* to_row = dw + ((i64(split) * groups + group) * m + row) * columns;
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    u32 column = column0 + share.warp_column + j * 8 + lane % 4 * 2 + e;
                    if (column < columns) to_row[column] = to(sums.of[i][j][half * 2 + e], OUT());
                }
        }
}
