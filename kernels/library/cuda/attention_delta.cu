// delta = Σ dy·y of each row of VALUE elements, which the gradient of attention needs; a warp takes a row.
//
// To be defined: T, the elements, and VALUE.

typedef Number<T>::Wide Sum;

extern "C" __global__ void attention_delta(Sum* delta, const T* dy, const T* y, i64 rows) {
    int lane = threadIdx.x % 32;
    for (i64 row = global_thread() / 32; row < rows; row += global_threads() / 32) {
        Sum sum = 0;
        for (int i = lane; i < VALUE; i += 32)
            sum += widen(dy[row * VALUE + i]) * widen(y[row * VALUE + i]);
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if (lane == 0) delta[row] = sum;
    }
}
