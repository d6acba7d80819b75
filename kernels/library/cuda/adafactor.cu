// A step of Adafactor (Shazeer & Stern 2018) for `batch` matrices of rows × cols, of which the state holds the mean
// squares of rows, then of columns; or, with rows = 0, for a vector of cols, whose state holds every square. In the
// order of the launches: sums over lines and over chunks of columns, the moments, the means of their rows, the squares
// of the update, the size of the step, the parameter. Sums are f64 and in one order. A skipped step changes nothing.

const int BLOCK = 256;
const i64 CHUNK = 64;
// What squares and their means are at least: f32's epsilon, as PyTorch takes it.
const f64 EPS = 1.1920928955078125e-7;

__device__ __forceinline__ f64 larger(f64 x, f64 y) { return x > y ? x : y; }
__device__ __forceinline__ f64 smaller(f64 x, f64 y) { return x < y ? x : y; }

// The gradient as the update reads it.
struct Scaled {
    const f32* grad;
    f64 factor, limit;
    __device__ __forceinline__ Scaled(const f32* grad, const f32* factor, const f32* clip)
        : grad(grad), factor(f64(*factor)), limit(f64(*clip)) {}
    __device__ __forceinline__ f64 at(i64 i) const {
        f64 x = f64(grad[i]) * factor;
        return limit == 0 ? x : smaller(larger(x, -limit), limit);
    }
};

// The gradient over the root of its second moment.
struct Update {
    Scaled g;
    const f32* state;
    const f64* means;
    i64 lines, rows, cols;
    __device__ __forceinline__ f64 at(i64 line, i64 col) const {
        f64 variance;
        if (rows == 0) {
            variance = f64(state[col]);
        } else {
            i64 matrix = line / rows;
            f64 of_col = f64(state[lines + matrix * cols + col]);
            variance = f64(state[line]) * of_col / larger(means[matrix], EPS);
        }
        return g.at(line * cols + col) / sqrt(larger(variance, EPS * EPS));
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_lines(f64* of_grad, f64* of_param, const f32* param, const f32* grad, const f32* factor, const f32* clip,
                i64 lines, i64 cols) {
    Scaled g(grad, factor, clip);
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
        f64 squares = 0, params = 0;
        for (i64 col = threadIdx.x; col < cols; col += BLOCK) {
            f64 x = g.at(line * cols + col), p = f64(param[line * cols + col]);
            squares += x * x;
            params += p * p;
        }
        squares = block_sum<BLOCK>(squares);
        params = block_sum<BLOCK>(params);
        if (threadIdx.x == 0) {
            of_grad[line] = squares;
            of_param[line] = params;
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_columns(f64* parts, const f32* grad, const f32* factor, const f32* clip, i64 rows, i64 cols, i64 chunks,
                  i64 total) {
    Scaled g(grad, factor, clip);
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        i64 chunk = i / cols, col = i - chunk * cols, matrix = chunk / chunks;
        i64 first = (chunk - matrix * chunks) * CHUNK;
        i64 end = first + CHUNK < rows ? first + CHUNK : rows;
        f64 sum = 0;
        for (i64 row = first; row < end; row++) {
            f64 x = g.at((matrix * rows + row) * cols + col);
            sum += x * x;
        }
        parts[i] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_moments(f32* state, const f64* of_grad, const f64* parts, const f32* exponent, const f32* step, const f32* skip,
                  i64 lines, i64 rows, i64 cols, i64 chunks, i64 total) {
    if (*skip != 0) return;
    f64 weight = pow(f64(*step) + 1, -f64(*exponent));
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        f64 mean;
        if (i < lines) {
            mean = of_grad[i] / f64(cols);
        } else {
            i64 matrix = (i - lines) / cols, col = i - lines - matrix * cols;
            f64 sum = 0;
            for (i64 chunk = 0; chunk < chunks; chunk++) sum += parts[(matrix * chunks + chunk) * cols + col];
            mean = rows == 0 ? sum : sum / f64(rows);
        }
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
adafactor_updates(f64* of_update, const f32* grad, const f32* state, const f64* means, const f32* factor, const f32* clip,
                  i64 lines, i64 state_lines, i64 rows, i64 cols) {
    Update update = {Scaled(grad, factor, clip), state, means, state_lines, rows, cols};
    for (i64 line = blockIdx.x; line < lines; line += gridDim.x) {
        f64 squares = 0;
        for (i64 col = threadIdx.x; col < cols; col += BLOCK) {
            f64 x = update.at(line, col);
            squares += x * x;
        }
        squares = block_sum<BLOCK>(squares);
        if (threadIdx.x == 0) of_update[line] = squares;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_size(f64* size, const f64* of_param, const f64* of_update, const f32* lr, const f32* eps, const f32* threshold,
               const f32* step, i64 lines, i64 numel) {
    f64 params = 0, updates = 0;
    for (i64 line = threadIdx.x; line < lines; line += BLOCK) {
        params += of_param[line];
        updates += of_update[line];
    }
    params = sqrt(block_sum<BLOCK>(params) / f64(numel));
    updates = sqrt(block_sum<BLOCK>(updates) / f64(numel));
    if (threadIdx.x == 0) {
        f64 alpha = larger(params, f64(*eps)) * smaller(f64(*lr), 1 / sqrt(f64(*step) + 1));
        *size = alpha / larger(updates / f64(*threshold), 1.0);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
adafactor_apply(f32* param, const f32* grad, const f32* state, const f64* means, const f64* size, const f32* lr,
                const f32* decay, const f32* factor, const f32* clip, const f32* skip, i64 state_lines, i64 rows, i64 cols,
                i64 total) {
    if (*skip != 0) return;
    Update update = {Scaled(grad, factor, clip), state, means, state_lines, rows, cols};
    f64 keep = 1 - f64(*lr) * f64(*decay);
    for (i64 i = global_thread(); i < total; i += global_threads()) {
        i64 line = i / cols;
        param[i] = f32(f64(param[i]) * keep - *size * update.at(line, i - line * cols));
    }
}
