// GELU in its tanh form and its gradient, for GEMMs whose library has no such epilogue. T: the elements.
//
// g(x) = x / (1 + exp(-2u)) with u = sqrt(2/pi) (x + 0.044715 x^3).

const f32 CUBE = 0.044715f;
// 2 sqrt(2/pi), and that in powers of two.
const f32 SLOPE = 1.5957691216057308f;
const f32 LOG2_E = 1.4426950408889634f;

// The logistic function of 2u; an infinity of exp2 makes it zero.
__device__ __forceinline__ f32 share_of(f32 x) {
    return 1.0f / (1.0f + exp2_fast(-SLOPE * LOG2_E * x * (1.0f + CUBE * x * x)));
}

// y = g(x).
extern "C" __global__ void gelu(T* y, const T* x, i64 n) {
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        f32 v = widen(x[i]);
        f32 share = share_of(v);
        // Avoids 0 times infinity.
        y[i] = to(share == 0.0f && v == v ? 0.0f : v * share, T());
    }
}

// y = y g'(x), in place.
extern "C" __global__ void gelu_grad(T* y, const T* x, i64 n) {
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        f32 v = widen(x[i]);
        f32 share = share_of(v), rest = 1.0f - share;
        // Where the function is linear, the second term is 0 times a power of x.
        f32 bend = share == 0.0f || rest == 0.0f ? 0.0f : SLOPE * v * (1.0f + 3.0f * CUBE * v * v) * share * rest;
        y[i] = to(widen(y[i]) * (share + bend), T());
    }
}
