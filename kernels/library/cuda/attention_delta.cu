// delta = Σ dy·y of each row of VALUE elements, which the gradient of attention needs; one warp per row.
//
// To be defined: T, the elements; VALUE; the parameters of the Layout of dy and of y.

typedef Number<T>::Wide Sum;
typedef Layout<DY_LAYOUT> Dy;
typedef Layout<Y_LAYOUT> Y;

extern "C" __global__ void attention_delta(Sum* delta, const T* dy, const T* y, i64 rows, i64 heads,
                                           i64 queries) {
    int lane = threadIdx.x % 32;
    for (i64 row = global_thread() / 32; row < rows; row += global_threads() / 32) {
        i64 query = row % queries, head = row / queries % heads, batch = row / queries / heads;
        const T *dy_row = dy + Dy::at(batch, head, query), *y_row = y + Y::at(batch, head, query);
        Sum sum = 0;
        for (int i = lane; i < VALUE; i += 32) sum += widen(dy_row[i]) * widen(y_row[i]);
        for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if (lane == 0) delta[row] = sum;
    }
}
