// Number of elements that are infinite or NaN, and Σ x², of many arrays: `stats_parts` computes a partial result per
// block, a part of one array, `stats_total` adds those of all, in a fixed order and in f64.
//
// To be defined: T, the elements; ARRAYS, how many arrays a launch reads.

#include "arrays.cuh"

const int BLOCK = 256;

struct Stats {
    f64 bad, squares;
};

__device__ __forceinline__ Stats block_sum(Stats x) {
    __shared__ Stats sums[BLOCK / 32];
    for (int mask = 16; mask > 0; mask /= 2) {
        x.bad += __shfl_xor_sync(~0u, x.bad, mask);
        x.squares += __shfl_xor_sync(~0u, x.squares, mask);
    }
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    Stats total = {0, 0};
    for (int i = 0; i < BLOCK / 32; i++) {
        total.bad += sums[i].bad;
        total.squares += sums[i].squares;
    }
    return total;
}

__device__ __forceinline__ void add(Stats& sum, f64 x) {
    sum.bad += !(fabs(x) < f64(__uint_as_float(0x7f800000)));
    sum.squares += x * x;
}

extern "C" __global__ void __launch_bounds__(BLOCK) stats_parts(Stats* parts, Arrays arrays, Sizes sizes) {
    const int VECTOR = 16 / sizeof(T);
    typedef Pack<T, VECTOR> Many;
    Share share = share_of_block(arrays, sizes);
    const T* x = share.x;
    i64 n = share.n, first = share.block * BLOCK + threadIdx.x, step = share.blocks * BLOCK;
    Stats sum = {0, 0};
    i64 whole = aligned(x, 16) ? n / VECTOR : 0;
    for (i64 i = first; i < whole; i += step) {
        Many many = reinterpret_cast<const Many*>(x)[i];
        for (int j = 0; j < VECTOR; j++) add(sum, widen(many.at[j]));
    }
    for (i64 i = whole * VECTOR + first; i < n; i += step) add(sum, widen(x[i]));
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(BLOCK) stats_total(f32* result, const Stats* parts, i64 n) {
    Stats sum = {0, 0};
    for (i64 i = threadIdx.x; i < n; i += BLOCK) {
        sum.bad += parts[i].bad;
        sum.squares += parts[i].squares;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        result[0] = f32(sum.bad);
        result[1] = f32(sum.squares);
    }
}
