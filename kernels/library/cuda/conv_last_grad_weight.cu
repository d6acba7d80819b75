// Implicit-GEMM gradient of a convolution's weights on tensor cores, of images that lie channels last: dw[m, taps · c] =
// Σ dy[p, m] · x[element of p under the tap, c] over the positions p of all images.
//
// Both operands have the contracted axis outside and contiguous vectors of 8 elements inside: filters of dy, channels
// under one tap of x. Asynchronous copies, which write zeros for the padding, bring them as they lie to tiles in shared
// memory; the tensor cores' operands are read transposed. A tile is loaded again, for STAGES steps later, as soon as it has
// been read; operands are read to registers one MMA step ahead.
//
// A block computes TILE_M × TILE_N elements of one part of the positions. Its warps, WARPS_M by WARPS_N, take turns of 16
// rows and of 16 columns, so that operands of a warp lie at constant offsets.
//
// To be defined: T (f16 or bf16), the elements of operands; OUT, of results; RANK, the number of spatial axes; WINDOW,
// the numbers of a `Window`; TILE_M (64 or 128); TILE_N (128, 192 or 256); STAGES, the tiles in shared memory, at least 2;
// CACHED, whether vectors of x are kept in the L1 cache, which helps if a block reads them under several taps.

#include "window.cuh"
#include "tensor_cores.cuh"

__device__ constexpr Window W = {WINDOW};
const int STEP = 32, WARPS = TILE_M == 128 && TILE_N > 128 ? 8 : 4, THREADS = WARPS * 32;
const int WARPS_M = TILE_M / 64, WARPS_N = WARPS / WARPS_M, WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;
// Vectors of a row that a thread loads, which are eight apart, and rows that the block loads at a time.
const int OF_M = TILE_M / 64, OF_N = TILE_N / 64, ROWS = THREADS / 8;
const int TILE = (TILE_M + TILE_N) * STEP;

// Where vector `first + own` of a row of a tile lies, for own < 8 and a `first` that has none of its bits: the same
// vector of eight rows is in different banks.
__device__ __forceinline__ int swizzled(int row, int first, int own) {
    return (first & ~7) * 8 + ((first & 7) ^ (row & 7) ^ own) * 8;
}

// Copies 8 elements, or zeros. Without WHOLE the address is not aligned, and the copy is not asynchronous.
template <bool WHOLE, bool CACHE>
__device__ __forceinline__ void load_vector(T* to, const T* from, bool exists) {
    if (!WHOLE) {
#pragma unroll 1
        for (int i = 0; i < 8; i++) to[i] = exists ? from[i] : T{0};
    } else if (CACHE) {
        copy_async_cached(to, from, exists);
    } else {
        copy_async(to, from, exists);
    }
}

// The vectors of x that a thread loads of each row: where they lie relative to a position.
struct Columns {
    int at[OF_N][RANK], offset[OF_N];

    __device__ __forceinline__ Columns(u32 column, u32 columns, u32 channels) {
#pragma unroll
        for (int j = 0; j < OF_N; j++) {
            u32 own = column + j * 64, tap = own / channels;
            bool exists = own < columns;
            int step = int(channels);
            offset[j] = int(own - tap * channels);
#pragma unroll
            for (int axis = RANK - 1; axis >= 0; axis--) {
                u32 next = tap / u32(W.taps[axis]);
                at[j][axis] = int(tap - next * u32(W.taps[axis])) * int(W.dilations[axis]);
                offset[j] += at[j][axis] * step;
                step *= int(W.input[axis]);
                tap = next;
            }
            // No position has an element there.
            if (!exists) at[j][0] = 1 << 29;
        }
    }
};

// The first element under the window at a position, on each axis and counted through all images. It may be in the
// padding.
struct Place {
    int at[RANK], index;

    __device__ __forceinline__ Place(u32 position, bool exists) {
        int step = 1;
        index = 0;
#pragma unroll
        for (int axis = RANK - 1; axis >= 0; axis--) {
            u32 next = position / u32(W.output[axis]), own = position - next * u32(W.output[axis]);
            at[axis] = int(own) * int(W.strides[axis]) - int(W.low[axis]);
            index += at[axis] * step;
            step *= int(W.input[axis]);
            position = next;
        }
        index += int(position) * step;
        if (!exists) at[0] = -(1 << 30);
    }
};

// The operands of an MMA step of a warp. They are loaded between the MMAs of the step before, so that its tensor cores do
// not wait for shared memory.
struct Operands {
    u32 a[WARP_M / 16][4], b[WARP_N / 16][4];

    // Part `i` of four. `left` is [STEP][TILE_M], `right` [STEP][TILE_N]; rows from `k` on are read.
    __device__ __forceinline__ void load(const T* left, const T* right, int k, int i) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int row_a = lane / 16 * 8 + lane % 8, own_a = warp / WARPS_N * 2 + lane / 8 % 2;
        int row_b = lane % 16, own_b = warp % WARPS_N * 2 + lane / 16;
        ldmatrix_transposed(a[i], left + (k + row_a) * TILE_M + swizzled(row_a, i * WARPS_M * 2, own_a));
        if (i < WARP_N / 16)
            ldmatrix_transposed(b[i], right + (k + row_b) * TILE_N + swizzled(row_b, i * WARPS_N * 2, own_b));
    }
};

template <class Between>
__device__ __forceinline__ void add(f32 (&sums)[WARP_M / 16][WARP_N / 8][4], const Operands& of, Between between) {
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++) {
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j++) {
            const u32* b = of.b[j / 2] + j % 2 * 2;
            mma(sums[i][j], of.a[i], b[0], b[1], T());
        }
        between(i);
    }
}

template <bool WHOLE>
__device__ __forceinline__ void compute(OUT* dw, const T* dy, const T* x, i64 n_images, i64 m, i64 c, i64 splits) {
    DYNAMIC_SHARED(shared);
    T* tiles = reinterpret_cast<T*>(shared);
    u32 filters = u32(m), columns = u32(c) * u32(Window::product(W.taps));
    u32 contracted = u32(n_images) * u32(Window::product(W.output));
    u32 tiles_m = (filters + TILE_M - 1) / TILE_M, tiles_n = (columns + TILE_N - 1) / TILE_N;
    u32 row0 = blockIdx.x % tiles_m * TILE_M, outer = blockIdx.x / tiles_m;
    u32 column0 = outer % tiles_n * TILE_N, split = outer / tiles_n;
    u32 all_steps = (contracted + STEP - 1) / STEP, per_split = (all_steps + u32(splits) - 1) / u32(splits);
    u32 first = split * per_split, last = first + per_split < all_steps ? first + per_split : all_steps;
    int steps = last > first ? int(last - first) : 0;
    // Beyond the end of the part, zeros are loaded.
    u32 end = last * STEP < contracted ? last * STEP : contracted;

    // Eight threads load a row.
    int vector = threadIdx.x % 8, own_row = threadIdx.x / 8;
    Columns of_x(column0 + vector * 8, columns, u32(c));
    u32 filter = row0 + vector * 8, next = first * STEP + own_row;
    auto load = [&](int stage) {
        T *left = tiles + stage * TILE, *right = left + TILE_M * STEP;
#pragma unroll
        for (int row = own_row; row < own_row + STEP; row += ROWS) {
            bool exists = next < end;
            Place place(next, exists);
            const T *from_dy = dy + i64(next) * filters + filter, *from_x = x + i64(place.index) * u32(c);
#pragma unroll
            for (int j = 0; j < OF_M; j++) {
                bool both = exists && filter + j * 64 < filters;
                T* to = left + row * TILE_M + swizzled(own_row, j * 8, vector);
                load_vector<WHOLE, false>(to, both ? from_dy + j * 64 : dy, both);
            }
#pragma unroll
            for (int j = 0; j < OF_N; j++) {
                bool meets = true;
#pragma unroll
                for (int axis = 0; axis < RANK; axis++)
                    meets = meets && u32(place.at[axis] + of_x.at[j][axis]) < u32(W.input[axis]);
                T* to = right + row * TILE_N + swizzled(own_row, j * 8, vector);
                load_vector<WHOLE, CACHED>(to, meets ? from_x + of_x.offset[j] : x, meets);
            }
            next += ROWS;
        }
    };

    f32 sums[WARP_M / 16][WARP_N / 8][4];
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[i][j][e] = 0;

#pragma unroll 1
    for (int stage = 0; stage < STAGES; stage++) {
        load(stage);
        copy_async_commit();
    }
    Operands now[2];
    auto read = [&](int which, int stage, int part) {
        const T* left = tiles + stage * TILE;
        now[which].load(left, left + TILE_M * STEP, which * 16, part);
    };
    copy_async_wait<STAGES - 1>();
    __syncthreads();
#pragma unroll
    for (int part = 0; part < 4; part++) read(0, 0, part);
    int stage = 0;
    for (int step = 0; step < steps; step++) {
        int next_stage = stage + 1 < STAGES ? stage + 1 : 0;
        add(sums, now[0], [&](int part) { read(1, stage, part); });
        // All warps have read this stage, and the next is there.
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        add(sums, now[1], [&](int part) { read(0, next_stage, part); });
        load(stage);
        copy_async_commit();
        stage = next_stage;
    }
    copy_async_wait<0>();

    // A lane has two neighboring columns, and rows have an even number of them.
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool pairs = aligned(dw, 2 * sizeof(OUT));
#pragma unroll
    for (int i = 0; i < WARP_M / 16; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 row = row0 + (i * WARPS_M + warp / WARPS_N) * 16 + half * 8 + lane / 4;
            if (row >= filters) continue;
            OUT* to_row = dw + (i64(split) * filters + row) * columns;
#pragma unroll
            for (int j = 0; j < WARP_N / 8; j++) {
                u32 column = column0 + (j / 2 * WARPS_N + warp % WARPS_N) * 16 + j % 2 * 8 + lane % 4 * 2;
                if (column >= columns) continue;
                Pack<OUT, 2> both = {{to(sums[i][j][half * 2], OUT()), to(sums[i][j][half * 2 + 1], OUT())}};
                move<OUT>(reinterpret_cast<Pack<OUT, 2>*>(to_row + column), &both, pairs);
            }
        }
}

// dw[splits, m, taps, c], as partial sums over `splits` parts of the positions, from dy[images, positions, m] and
// x[images, size, c]. Channels and filters are multiples of 8.
extern "C" __global__ void __launch_bounds__(THREADS, 8 / WARPS)
conv_last_grad_weight(OUT* dw, const T* dy, const T* x, i64 n_images, i64 m, i64 c, i64 splits) {
    // Without branches in the loop, copies are issued between MMAs.
    if (aligned(x, 16) && aligned(dy, 16)) compute<true>(dw, dy, x, n_images, m, c, splits);
    else compute<false>(dw, dy, x, n_images, m, c, splits);
}
