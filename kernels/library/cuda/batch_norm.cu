// Batch normalization of x[N, C, size] and its gradient. The gridDim.y blocks of a channel each write a part of it,
// after those of `…_parts` have each summed one; all blocks add the partial sums in the same order. A single block per
// channel sums by itself. Sums are f64 of differences from the channel's first element, so that the variance does not
// cancel.
//
//   y = (x - mean) / √(var + eps) · scale + bias
//   dbias = Σ dy,  dscale = Σ dy · n,  dx = scale / √(var + eps) · (dy - dbias / count - n · dscale / count)
//
// with n = (x - mean) / √(var + eps) and count = N · size. Another tensor may be added to y, and a ReLU follow; what
// passes such a ReLU backward is written by the partial sums, and is dy then. Every operation rounds to T, as if it were
// a kernel of its own.
//
// To be defined: T, the elements; S, those of scale, bias and statistics; WIDTH, the elements per access, a divisor of
// size.

#include "block_sum.cuh"

typedef Number<T>::Wide Value;
typedef Pack<T, WIDTH> Many;
const int BLOCK = 512;

struct Sums { f64 a, b; };

// A channel as vectors, and the range of a block.
struct Channel {
    u32 row, begin, end;
    i64 channels, c;

    __device__ __forceinline__ Channel(i64 batch, i64 channels, i64 size, i64 c, u32 part, u32 parts)
        : row(u32(size) / WIDTH), channels(channels), c(c) {
        u32 packs = u32(batch) * row, share = (packs + parts - 1) / parts;
        begin = part * share < packs ? part * share : packs;
        end = begin + share < packs ? begin + share : packs;
    }
    // Offset of vector i.
    __device__ __forceinline__ i64 place(u32 i) const {
        u32 image = i / row;
        return (i64(image) * channels + c) * row + (i - image * row);
    }
    __device__ __forceinline__ Many read(const T* x, i64 place, bool whole) const {
        Many all;
        move<T>(&all, reinterpret_cast<const Many*>(x) + place, whole);
        return all;
    }
    __device__ __forceinline__ f64 origin(const T* x) const { return f64(widen(x[place(0) * WIDTH])); }

    // Sums of the differences of the block's elements from the first, and of their squares.
    __device__ __forceinline__ Sums moments(const T* x) const {
        f64 first = origin(x), a = 0, b = 0;
        bool whole = aligned(x, sizeof(Many));
        for (u32 i = begin + threadIdx.x; i < end; i += BLOCK) {
            Many in = read(x, place(i), whole);
            for (int j = 0; j < WIDTH; j++) {
                f64 d = f64(widen(in.at[j])) - first;
                a += d;
                b += d * d;
            }
        }
        return {block_sum<BLOCK>(a), block_sum<BLOCK>(b)};
    }
    // dy, and dy · n. `change(dy, at)` changes a vector of dy first.
    template <class Change>
    __device__ __forceinline__ Sums gradients(const T* dy, const T* x, f64 mean, f64 rstd, Change change) const {
        f64 a = 0, b = 0;
        bool whole = aligned(x, sizeof(Many)) && aligned(dy, sizeof(Many));
        for (u32 i = begin + threadIdx.x; i < end; i += BLOCK) {
            i64 at = place(i);
            Many of_y = read(dy, at, whole), of_x = read(x, at, whole);
            change(of_y, at);
            for (int j = 0; j < WIDTH; j++) {
                f64 d = f64(widen(of_y.at[j]));
                a += d;
                b += d * (f64(widen(of_x.at[j])) - mean) * rstd;
            }
        }
        return {block_sum<BLOCK>(a), block_sum<BLOCK>(b)};
    }
    __device__ __forceinline__ Sums gradients(const T* dy, const T* x, f64 mean, f64 rstd) const {
        return gradients(dy, x, mean, rstd, [](Many&, i64) {});
    }
};

__device__ __forceinline__ T plus(T a, T b) { return to(widen(a) + widen(b), T()); }

__device__ __forceinline__ Sums added(const Sums* parts, i64 c) {
    Sums all = {0, 0};
    for (u32 i = 0; i < gridDim.y; i++) {
        Sums part = parts[c * gridDim.y + i];
        all.a += part.a;
        all.b += part.b;
    }
    return all;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_parts(Sums* parts, const T* x, i64 batch, i64 channels, i64 size, f64) {
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Sums sums = Channel(batch, channels, size, c, blockIdx.y, gridDim.y).moments(x);
        if (threadIdx.x == 0) parts[c * gridDim.y + blockIdx.y] = sums;
    }
}

template <bool HAS_RELU, bool HAS_SUM>
__device__ __forceinline__ void normalize(T* y, S* mean_out, S* var_out, const T* x, const S* scale, const S* bias,
                                          const T* other, const Sums* parts, i64 batch, i64 channels, i64 size, f64 eps) {
    f64 n = f64(batch * size);
    bool whole = aligned(x, sizeof(Many)) && aligned(y, sizeof(Many)) && aligned(other, sizeof(Many));
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel(batch, channels, size, c, blockIdx.y, gridDim.y);
        Sums sums = gridDim.y == 1 ? channel.moments(x) : added(parts, c);
        f64 mean = channel.origin(x) + sums.a / n, var = sums.b / n - (sums.a / n) * (sums.a / n);
        if (var < 0) var = 0;
        Value factor = Value(f64(widen(scale[c])) / sqrt(var + eps)), middle = Value(mean);
        Value shift = Value(widen(bias[c]));
        for (u32 i = channel.begin + threadIdx.x; i < channel.end; i += BLOCK) {
            i64 at = channel.place(i);
            Many in = channel.read(x, at, whole), out, term;
            if (HAS_SUM) term = channel.read(other, at, whole);
            for (int j = 0; j < WIDTH; j++) {
                T z = to((widen(in.at[j]) - middle) * factor + shift, T());
                if (HAS_SUM) z = plus(z, term.at[j]);
                // A NaN stays one.
                if (HAS_RELU && widen(z) <= 0) z = to(Value(0), T());
                out.at[j] = z;
            }
            move<T>(reinterpret_cast<Many*>(y) + at, &out, whole);
        }
        if (threadIdx.x == 0 && blockIdx.y == 0) {
            mean_out[c] = to(mean, S());
            var_out[c] = to(var, S());
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm(T* y, S* mean_out, S* var_out, const T* x, const S* scale, const S* bias, const Sums* parts, i64 batch,
           i64 channels, i64 size, f64 eps) {
    normalize<false, false>(y, mean_out, var_out, x, scale, bias, nullptr, parts, batch, channels, size, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_relu(T* y, S* mean_out, S* var_out, const T* x, const S* scale, const S* bias, const Sums* parts, i64 batch,
                i64 channels, i64 size, f64 eps) {
    normalize<true, false>(y, mean_out, var_out, x, scale, bias, nullptr, parts, batch, channels, size, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_sum_relu(T* y, S* mean_out, S* var_out, const T* x, const S* scale, const S* bias, const T* other,
                    const Sums* parts, i64 batch, i64 channels, i64 size, f64 eps) {
    normalize<true, true>(y, mean_out, var_out, x, scale, bias, other, parts, batch, channels, size, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_grad_parts(Sums* parts, const T* dy, const T* x, const S* mean, const S* var, i64 batch, i64 channels,
                      i64 size, f64 eps) {
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel(batch, channels, size, c, blockIdx.y, gridDim.y);
        Sums sums = channel.gradients(dy, x, f64(widen(mean[c])), 1 / sqrt(f64(widen(var[c])) + eps));
        if (threadIdx.x == 0) parts[c * gridDim.y + blockIdx.y] = sums;
    }
}

// `dy` may be `dx`. The sums are those of `parts` with HAS_PARTS, also of a single block per channel.
template <bool HAS_PARTS>
__device__ __forceinline__ void differentiate(T* dx, S* dscale, S* dbias, const T* dy, const T* x, const S* scale,
                                              const S* mean, const S* var, const Sums* parts, i64 batch, i64 channels,
                                              i64 size, f64 eps) {
    f64 n = f64(batch * size);
    bool whole = aligned(x, sizeof(Many)) && aligned(dy, sizeof(Many)) && aligned(dx, sizeof(Many));
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel(batch, channels, size, c, blockIdx.y, gridDim.y);
        f64 middle = f64(widen(mean[c])), rstd = 1 / sqrt(f64(widen(var[c])) + eps);
        bool has_parts = HAS_PARTS || gridDim.y > 1;
        Sums sums = has_parts ? added(parts, c) : channel.gradients(dy, x, middle, rstd);
        Value factor = Value(f64(widen(scale[c])) * rstd), shift = Value(sums.a / n);
        Value slope = Value(sums.b / n * rstd), m = Value(middle);
        for (u32 i = channel.begin + threadIdx.x; i < channel.end; i += BLOCK) {
            i64 at = channel.place(i);
            Many of_y = channel.read(dy, at, whole), of_x = channel.read(x, at, whole), out;
            for (int j = 0; j < WIDTH; j++) {
                Value d = widen(of_y.at[j]) - shift - (widen(of_x.at[j]) - m) * slope;
                out.at[j] = to(factor * d, T());
            }
            move<T>(reinterpret_cast<Many*>(dx) + at, &out, whole);
        }
        if (threadIdx.x == 0 && blockIdx.y == 0) {
            dscale[c] = to(sums.b, S());
            dbias[c] = to(sums.a, S());
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_grad(T* dx, S* dscale, S* dbias, const T* dy, const T* x, const S* scale, const S* mean, const S* var,
                const Sums* parts, i64 batch, i64 channels, i64 size, f64 eps) {
    differentiate<false>(dx, dscale, dbias, dy, x, scale, mean, var, parts, batch, channels, size, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_relu_grad(T* dx, S* dscale, S* dbias, const T* passed, const T* x, const S* scale, const S* mean,
                     const S* var, const Sums* parts, i64 batch, i64 channels, i64 size, f64 eps) {
    differentiate<true>(dx, dscale, dbias, passed, x, scale, mean, var, parts, batch, channels, size, eps);
}

// The partial sums of a gradient that passes a ReLU of result y where that is positive, which is written to `passed`;
// another gradient may be added to it before.
template <bool HAS_SUM>
__device__ __forceinline__ void gate(Sums* parts, T* passed, const T* dy, const T* x, const S* mean, const S* var,
                                     const T* y, const T* other, i64 batch, i64 channels, i64 size, f64 eps) {
    bool whole = aligned(y, sizeof(Many)) && aligned(passed, sizeof(Many)) && aligned(other, sizeof(Many));
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel(batch, channels, size, c, blockIdx.y, gridDim.y);
        auto pass = [&](Many& of_y, i64 at) {
            Many by = channel.read(y, at, whole), term;
            if (HAS_SUM) term = channel.read(other, at, whole);
            for (int j = 0; j < WIDTH; j++) {
                T sum = HAS_SUM ? plus(of_y.at[j], term.at[j]) : of_y.at[j];
                of_y.at[j] = widen(by.at[j]) > 0 ? sum : to(Value(0), T());
            }
            move<T>(reinterpret_cast<Many*>(passed) + at, &of_y, whole);
        };
        Sums sums = channel.gradients(dy, x, f64(widen(mean[c])), 1 / sqrt(f64(widen(var[c])) + eps), pass);
        if (threadIdx.x == 0) parts[c * gridDim.y + blockIdx.y] = sums;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_relu_grad_parts(Sums* parts, T* passed, const T* dy, const T* x, const S* mean, const S* var, const T* y,
                           i64 batch, i64 channels, i64 size, f64 eps) {
    gate<false>(parts, passed, dy, x, mean, var, y, nullptr, batch, channels, size, eps);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_sum_relu_grad_parts(Sums* parts, T* passed, const T* dy, const T* x, const S* mean, const S* var, const T* y,
                               const T* other, i64 batch, i64 channels, i64 size, f64 eps) {
    gate<true>(parts, passed, dy, x, mean, var, y, other, batch, channels, size, eps);
}

// rstd = 1 / √(var + eps), which cuDNN stores, and back.
extern "C" __global__ void batch_norm_rstd(S* rstd, const S* var, i64 n, f64 eps) {
    for (i64 c = global_thread(); c < n; c += global_threads()) rstd[c] = to(1 / sqrt(f64(widen(var[c])) + eps), S());
}

extern "C" __global__ void batch_norm_var(S* var, const S* rstd, i64 n, f64 eps) {
    for (i64 c = global_thread(); c < n; c += global_threads()) {
        f64 r = widen(rstd[c]), v = 1 / (r * r) - eps;
        var[c] = to(v > 0 ? v : v != v ? v : 0, S());
    }
}
