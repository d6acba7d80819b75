// Attention without tensor cores, for f32 and f64 and for large heads; shared by its kernels.
//
// To be defined: T, the elements; HEAD and VALUE, the sizes of a query and of a value; CAUSAL (0 or 1); WINDOW, the
// keys on either side visible to a query, counting itself, or 0 for all; MASK (NO_MASK, ADDED or KEPT) with elements
// MASK_T; R, the rows of a warp; COARSE and FILLED of the operation, if a mask is added; DROPOUT.
//
// A block of four warps holds 4·R rows of one side in shared memory and iterates over tiles of 32 rows of the other,
// one per lane; a row of sums is distributed over the lanes. Everything is computed in the wide type of T. Rows of
// tiles are padded by one element, so that lanes read different banks.

#include "sight.cuh"
#include "dropout.cuh"

#define NO_MASK 0
#define ADDED 1
#define KEPT 2

typedef Number<T>::Wide Sum;
const int WARPS = 4;
const int THREADS = WARPS * 32;
const int BLOCK = WARPS * R;
const int TILE = 32;

__device__ __forceinline__ f32 exponential(f32 x) { return expf(x); }
__device__ __forceinline__ f64 exponential(f64 x) { return exp(x); }
__device__ __forceinline__ f32 logarithm(f32 x) { return logf(x); }
__device__ __forceinline__ f64 logarithm(f64 x) { return log(x); }
__device__ __forceinline__ Sum infinite() { return Sum(__uint_as_float(0x7f800000)); }

// Sizes of an attention, and strides of the mask's elements.
struct Shape {
    i64 heads, groups, queries, keys;
    i64 mask_batch, mask_head, mask_query, mask_key;
};

// N rows, of which `valid` exist, the others zero.
template <int N, int SIZE> __device__ __forceinline__ void load_rows(Sum* tile, const T* from, i64 valid) {
    for (int i = threadIdx.x; i < N * SIZE; i += THREADS) {
        int row = i / SIZE, column = i % SIZE;
        tile[row * (SIZE + 1) + column] = row < valid ? Sum(widen(from[i64(row) * SIZE + column])) : Sum(0);
    }
}

template <int SIZE> __device__ __forceinline__ Sum dot(const Sum* a, const Sum* b) {
    Sum sum = 0;
    for (int i = 0; i < SIZE; i++) sum += a[i] * b[i];
    return sum;
}

// A lane's part of a row of SIZE sums.
template <int SIZE> struct Row {
    static const int N = (SIZE + 31) / 32;
    Sum at[N];

    __device__ __forceinline__ void scale(Sum factor) {
#pragma unroll
        for (int i = 0; i < N; i++) at[i] *= factor;
    }
    // Adds the rows of a tile, each with the weight that its lane holds.
    __device__ __forceinline__ void add(Sum weight, const Sum* tile) {
        int lane = threadIdx.x % 32;
        for (int j = 0; j < TILE; j++) {
            Sum w = __shfl_sync(~0u, weight, j);
#pragma unroll
            for (int i = 0; i < N; i++)
                if (i * 32 + lane < SIZE) at[i] += w * tile[j * (SIZE + 1) + i * 32 + lane];
        }
    }
    __device__ __forceinline__ void store(T* target, Sum factor) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * 32 + lane < SIZE) target[i * 32 + lane] = to(at[i] * factor, T());
    }
};

__device__ __forceinline__ Sum warp_sum(Sum x) {
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}
__device__ __forceinline__ Sum warp_most(Sum x) {
    for (int mask = 16; mask > 0; mask /= 2) {
        Sum other = __shfl_xor_sync(~0u, x, mask);
        x = other > x ? other : x;
    }
    return x;
}

// The score of a dot product q · k.
__device__ __forceinline__ Sum score(Sum dot, Sum scale, const MASK_T* mask) {
#if MASK == ADDED
    return dot * scale + Sum(widen(*mask));
#elif MASK == KEPT
    return mask->bits ? dot * scale : -infinite();
#else
    return dot * scale;
#endif
}

// e^(s - lse) for a query and a key that exist; 0 in rows that have no key.
__device__ __forceinline__ Sum weight(Sum dot, Sum lse, Sum scale, const MASK_T* mask) {
    return lse == -infinite() ? Sum(0) : exponential(score(dot, scale, mask) - lse);
}

// Whether weights of a row must be divided by their sum, as its lse is coarse.
__device__ __forceinline__ bool is_coarse(Sum lse) {
#if MASK == ADDED
    return lse < COARSE && lse != -infinite();
#else
    return false;
#endif
}

// Whether every score of a row was replaced by a number that a mask adds, and so has no gradient.
__device__ __forceinline__ bool is_filled(Sum lse) {
#if MASK == ADDED
    return lse == Sum(FILLED);
#else
    return false;
#endif
}

__device__ __forceinline__ bool is_hidden(const Shape& shape, i64 query, i64 key) {
    return query >= shape.queries || key >= shape.keys || is_hidden(query, key);
}

__device__ __forceinline__ i64 mask_place(const Shape& shape, i64 batch, i64 head, i64 query, i64 key) {
    if (MASK == NO_MASK) return 0;
    return batch * shape.mask_batch + head * shape.mask_head + query * shape.mask_query + key * shape.mask_key;
}
