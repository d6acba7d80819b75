// Running sums along the middle axis of [outer, size, inner]; one warp per line, 32 elements at a time.
//
// To be defined: T, the elements; EXCLUSIVE and REVERSE (0 or 1).

typedef Number<T>::Wide Value;

extern "C" __global__ void cum_sum(T* y, const T* x, i64 outer, i64 size, i64 inner) {
    int lane = threadIdx.x % 32;
    for (i64 line = global_thread() / 32; line < outer * inner; line += global_threads() / 32) {
        i64 start = line / inner * size * inner + line % inner;
        Value before = 0;
        for (i64 step = 0; step < size; step += 32) {
            i64 i = step + lane, at = start + (REVERSE ? size - 1 - i : i) * inner;
            Value own = i < size ? widen(x[at]) : Value(0), sum = own;
            for (int d = 1; d < 32; d *= 2) {
                Value other = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += other;
            }
            Value up_to = __shfl_up_sync(~0u, sum, 1);
            if (lane == 0) up_to = 0;
            if (i < size) y[at] = to(before + (EXCLUSIVE ? up_to : sum), T());
            before += __shfl_sync(~0u, sum, 31);
        }
    }
}
