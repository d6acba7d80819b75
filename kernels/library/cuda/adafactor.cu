// The parts of a step of Adafactor (Shazeer & Stern 2018) for the elements of a parameter that lie in one part of a
// flat tensor: from element *begin of that part on, which may be before or behind it. The parameter is matrices of rows
// × cols, of which the state holds the mean squares of rows, then of columns; or, with rows = 0, a vector of cols,
// whose state holds every square. Kernels of the sums: over lines and over chunks of columns, then both to f32. Of the
// moments: the moments, the means of their rows, the squares of the update. Of the step: the parameter. Sums are f64 in
// a fixed order. A skipped step changes nothing.

#include "block_sum.cuh"

const int BLOCK = 256;
const i64 CHUNK = 64;
// Minimum of squares and their means: f32's epsilon, as in PyTorch.
const f64 EPS = 1.1920928955078125e-7;

__device__ __forceinline__ f64 larger(f64 x, f64 y) { return x > y ? x : y; }
__device__ __forceinline__ f64 smaller(f64 x, f64 y) { return x < y ? x : y; }
__device__ __forceinline__ i64 within(i64 x, i64 low, i64 high) { return x < low ? low : x > high ? high : x; }

// The scaled gradient, and the elements of the parameter in this part.
struct Part {
    const f32* grad;
    i64 begin, first, end;
    f64 factor, limit;
    __device__ __forceinline__ Part(const i64* begin_at, const f32* grad, const f32* factor, const f32* clip, i64 numel,
                                    i64 len)
        : grad(grad), begin(*begin_at), first(within(-*begin_at, 0, numel)), end(within(len - *begin_at, 0, numel)),
          factor(f64(*factor)), limit(f64(*clip)) {}
    __device__ __forceinline__ f64 at(i64 i) const {
        f64 x = f64(grad[begin + i]) * factor;
        return limit == 0 ? x : smaller(larger(x, -limit), limit);
    }
};

// The gradient divided by the root of its second moment.
struct Update {
    Part part;
    const f32* state;
    const f64* means;
    i64 lines, rows, cols;
    __device__ __forceinline__ f64 at(i64 i) const {
        f64 variance;
        i64 line = i / cols, col = i - line * cols;
        if (rows == 0) {
            variance = f64(state[col]);
        } else {
            i64 matrix = line / rows;
            f64 of_col = f64(state[lines + matrix * cols + col]);
            variance = f64(state[line]) * of_col / larger(means[matrix], EPS);
        }
        return part.at(i) / sqrt(larger(variance, EPS * EPS));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_lines(f64* of_grad, f64* of_param, const i64* begin, const f32* grad, const f32* param, const f32* clip,
                const f32* factor, i64 lines, i64 cols, i64 len) {
    Part part(begin, grad, factor, clip, lines * cols, len);
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
        i64 from = within(part.first, line * cols, (line + 1) * cols), to = within(part.end, line * cols, (line + 1) * cols);
        f64 squares = 0, params = 0;
        for (i64 i = from + threadIdx.x; i < to; i += BLOCK) {
            f64 x = part.at(i), p = f64(param[part.begin + i]);
            squares += x * x;
            params += p * p;
        }
        if (from < to) {
            squares = block_sum<BLOCK>(squares);
            params = block_sum<BLOCK>(params);
        }
        if (threadIdx.x == 0) {
            of_grad[line] = squares;
            of_param[line] = params;
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_columns(f64* parts, const i64* begin, const f32* grad, const f32* clip, const f32* factor, i64 rows, i64 cols,
                  i64 chunks, i64 total, i64 numel, i64 len) {
    Part part(begin, grad, factor, clip, numel, len);
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        i64 chunk = i / cols, col = i - chunk * cols, matrix = chunk / chunks;
        i64 first = (chunk - matrix * chunks) * CHUNK;
        i64 end = first + CHUNK < rows ? first + CHUNK : rows;
        f64 sum = 0;
        for (i64 row = first; row < end; row++) {
            i64 element = (matrix * rows + row) * cols + col;
            if (element >= part.first && element < part.end) {
                f64 x = part.at(element);
                sum += x * x;
            }
        }
        parts[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_sums(f32* sums, const f64* of_grad, const f64* parts, i64 lines, i64 cols, i64 chunks, i64 total, f64 share) {
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        f64 sum = 0;
        if (i < lines) {
            sum = of_grad[i];
        } else {
            i64 matrix = (i - lines) / cols, col = i - lines - matrix * cols;
            for (i64 chunk = 0; chunk < chunks; chunk++) sum += parts[(matrix * chunks + chunk) * cols + col];
        }
        sums[i] = f32(sum * share);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) adafactor_total(f32* total, const f64* values, i64 n, f64 share) {
    f64 sum = 0;
    for (i64 i = threadIdx.x; i < n; i += BLOCK) sum += values[i];
    sum = block_sum<BLOCK>(sum);
    if (threadIdx.x == 0) *total = f32(sum * share);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_moments(f32* state, const f32* sums, const f32* exponent, const f32* step, const f32* skip, i64 lines, i64 rows,
                  i64 cols, i64 total) {
    if (*skip != 0) return;
    f64 weight = pow(f64(*step) + 1, -f64(*exponent));
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        f64 mean = f64(sums[i]);
        if (rows > 0) mean /= f64(i < lines ? cols : rows);
        state[i] = f32(f64(state[i]) + (mean - f64(state[i])) * weight);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) adafactor_means(f64* means, const f32* state, i64 matrices, i64 rows) {
    for (i64 matrix = blockIdx.x; matrix < matrices; matrix += gridDim.x) {
        f64 sum = 0;
        for (i64 row = threadIdx.x; row < rows; row += BLOCK) sum += f64(state[matrix * rows + row]);
        sum = block_sum<BLOCK>(sum);
        if (threadIdx.x == 0) means[matrix] = sum / f64(rows);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_updates(f64* of_update, const i64* begin, const f32* grad, const f32* state, const f64* means, const f32* clip,
                  const f32* factor, const f32* skip, i64 lines, i64 state_lines, i64 rows, i64 cols, i64 len) {
    Update update = {Part(begin, grad, factor, clip, lines * cols, len), state, means, state_lines, rows, cols};
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
        i64 from = within(update.part.first, line * cols, (line + 1) * cols);
        i64 to = within(update.part.end, line * cols, (line + 1) * cols);
        f64 squares = 0;
        if (from < to && *skip == 0) {
            for (i64 i = from + threadIdx.x; i < to; i += BLOCK) {
                f64 x = update.at(i);
                squares += x * x;
            }
            squares = block_sum<BLOCK>(squares);
        }
        if (threadIdx.x == 0) of_update[line] = squares;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_step(f32* param, const i64* begin, const f32* grad, const f32* state, const f64* means, const f32* of_param,
               const f32* of_update, const f32* lr, const f32* eps, const f32* threshold, const f32* decay,
               const f32* clip, const f32* step, const f32* factor, const f32* skip, i64 state_lines, i64 rows, i64 cols,
               i64 numel, i64 len) {
    if (*skip != 0) return;
    Update update = {Part(begin, grad, factor, clip, numel, len), state, means, state_lines, rows, cols};
    f64 params = sqrt(f64(*of_param) / f64(numel)), updates = sqrt(f64(*of_update) / f64(numel));
    f64 alpha = larger(params, f64(*eps)) * smaller(f64(*lr), 1 / sqrt(f64(*step) + 1));
    f64 rate = alpha / larger(updates / f64(*threshold), 1.0);
    f64 keep = 1 - f64(*lr) * f64(*decay);
    for (i64 i = update.part.first + global_thread(); i < update.part.end; i += global_threads()) {
        i64 at = update.part.begin + i;
        param[at] = f32(f64(param[at]) * keep - rate * update.at(i));
    }
}
