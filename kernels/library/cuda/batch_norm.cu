// Batch normalization of x[N, C, size] and its gradient; a block takes a channel. Sums are f64.
//
//   y = (x - mean) / √(var + eps) · scale + bias
//   dbias = Σ dy,  dscale = Σ dy · n,  dx = scale / √(var + eps) · (dy - dbias / count - n · dscale / count)
//
// with n = (x - mean) / √(var + eps) and count = N · size.
//
// To be defined: T, the elements; S, those of scale, bias and statistics.

typedef Number<T>::Wide Value;
const int BLOCK = 512;

// Where element i of a channel is.
struct Channel {
    i64 channels, size, c;
    __device__ __forceinline__ i64 place(u32 i) const {
        u32 image = i / u32(size);
        return (i64(image) * channels + c) * size + (i - image * u32(size));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm(T* y, S* mean_out, S* var_out, const T* x, const S* scale, const S* bias, i64 batch, i64 channels,
           i64 size, f64 eps) {
    u32 n = u32(batch * size);
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel = {channels, size, c};
        f64 sum = 0, squares = 0;
        for (u32 i = threadIdx.x; i < n; i += BLOCK) sum += f64(widen(x[channel.place(i)]));
        f64 mean = block_sum<BLOCK>(sum) / n;
        for (u32 i = threadIdx.x; i < n; i += BLOCK) {
            f64 d = f64(widen(x[channel.place(i)])) - mean;
            squares += d * d;
        }
        f64 var = block_sum<BLOCK>(squares) / n;
        Value factor = Value(f64(widen(scale[c])) / sqrt(var + eps)), middle = Value(mean);
        Value shift = Value(widen(bias[c]));
        for (u32 i = threadIdx.x; i < n; i += BLOCK) {
            i64 at = channel.place(i);
            y[at] = to((widen(x[at]) - middle) * factor + shift, T());
        }
        if (threadIdx.x == 0) {
            mean_out[c] = to(mean, S());
            var_out[c] = to(var, S());
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
batch_norm_grad(T* dx, S* dscale, S* dbias, const T* dy, const T* x, const S* scale, const S* mean,
                const S* var, i64 batch, i64 channels, i64 size, f64 eps) {
    u32 n = u32(batch * size);
    for (i64 c = blockIdx.x; c < channels; c += gridDim.x) {
        Channel channel = {channels, size, c};
        f64 middle = f64(widen(mean[c])), rstd = 1 / sqrt(f64(widen(var[c])) + eps);
        f64 sum = 0, product = 0;
        for (u32 i = threadIdx.x; i < n; i += BLOCK) {
            i64 at = channel.place(i);
            f64 d = f64(widen(dy[at]));
            sum += d;
            product += d * (f64(widen(x[at])) - middle) * rstd;
        }
        sum = block_sum<BLOCK>(sum);
        product = block_sum<BLOCK>(product);
        Value factor = Value(f64(widen(scale[c])) * rstd), shift = Value(sum / n);
        Value slope = Value(product / n * rstd), m = Value(middle);
        for (u32 i = threadIdx.x; i < n; i += BLOCK) {
            i64 at = channel.place(i);
            dx[at] = to(factor * (widen(dy[at]) - shift - (widen(x[at]) - m) * slope), T());
        }
        if (threadIdx.x == 0) {
            dscale[c] = to(product, S());
            dbias[c] = to(sum, S());
        }
    }
}

// rstd = 1 / √(var + eps), as libraries keep it, and back.
extern "C" __global__ void batch_norm_rstd(S* rstd, const S* var, i64 n, f64 eps) {
    for (i64 c = global_thread(); c < n; c += global_threads()) rstd[c] = to(1 / sqrt(f64(widen(var[c])) + eps), S());
}

extern "C" __global__ void batch_norm_var(S* var, const S* rstd, i64 n, f64 eps) {
    for (i64 c = global_thread(); c < n; c += global_threads()) {
        f64 r = widen(rstd[c]), v = 1 / (r * r) - eps;
        var[c] = to(v > 0 ? v : v != v ? v : 0, S());
    }
}
