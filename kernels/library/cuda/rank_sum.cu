// The sums of as many rows, one of each rank, in a balanced binary tree: of neighbors first.
//
// To be defined: RANKS, a power of two.

template <int N> __device__ __forceinline__ f32 sum_of(const f32* x, i64 n) {
    return __fadd_rn(sum_of<N / 2>(x, n), sum_of<N / 2>(x + N / 2 * n, n));
}
template <> __device__ __forceinline__ f32 sum_of<1>(const f32* x, i64 n) { return *x; }

extern "C" __global__ void __launch_bounds__(256) rank_sum(f32* result, const f32* rows, i64 n) {
    for (i64 i = global_thread(); i < n; i += global_threads()) result[i] = sum_of<RANKS>(rows + i, n);
}
