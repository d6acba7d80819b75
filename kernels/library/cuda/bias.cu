// Adds a bias to every row, for GEMMs whose library has no such epilogue. T: the elements.

// y = y + bias, in place: matrices of that many elements, rows of `n`, a batch stride of `stride` elements.
extern "C" __global__ void add_bias(T* y, const T* bias, i64 n, i64 matrix, i64 stride, i64 numel) {
    for (i64 i = global_thread(); i < numel; i += global_threads()) {
        i64 at = i / matrix * stride + i % matrix;
        y[at] = to(widen(y[at]) + widen(bias[i % n]), T());
    }
}
