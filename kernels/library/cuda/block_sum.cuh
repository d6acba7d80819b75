// The sum of a value over the BLOCK threads of a block, returned to all of them; in a fixed order.

template <int BLOCK>
__device__ __forceinline__ f64 block_sum(f64 x) {
    __shared__ f64 sums[BLOCK / 32];
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    f64 total = 0;
    for (int i = 0; i < BLOCK / 32; i++) total += sums[i];
    return total;
}
