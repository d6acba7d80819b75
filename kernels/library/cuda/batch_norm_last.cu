// Batch normalization of x[rows, channels] and its gradient: images that have the channels of a position next to each
// other. The formulas and their rounding are those of `batch_norm.cu`.
//
// `…_parts` sum the elements of each channel, every block over a part of the rows; `…_total` add the parts of a channel
// and derive what is constant in it; the others compute the images. A block is `columns` vectors wide and as many rows
// high as it has threads for (lanes), and takes every gridDim.y-th such group of rows. So a thread has the same channels
// in all of its rows. The images are computed from the last rows to the first, as the last ones may still be in the
// cache.
//
// GPUs are slow at f64: a thread sums the rows of a run as Value, and adds only the sums of runs as f64. The elements of
// a run are taken relative to its first one, so that the variance does not cancel even where the first element of the
// channel is far from the others.
//
// To be defined: T, the elements; S, those of scale, bias and statistics; WIDTH, the elements per access, a divisor of
// channels.

// Elements in as few registers as they fill: each of 2 bytes would otherwise have its own while it waits for others.
template <class Element, int N, bool IN_PAIRS> struct Vector {
    Pack<Element, N> all;
    __device__ __forceinline__ Element at(int j) const { return all.at[j]; }
    __device__ __forceinline__ void set(int j, Element x) { all.at[j] = x; }
};
template <class Element, int N> struct Vector<Element, N, true> {
    Pack<u32, N / 2> all;
    __device__ __forceinline__ Element at(int j) const { return Element{u16(all.at[j / 2] >> j % 2 * 16)}; }
    __device__ __forceinline__ void set(int j, Element x) {
        u32& pair = all.at[j / 2];
        pair = j % 2 == 0 ? (pair & 0xffff0000) | x.bits : (pair & 0xffff) | u32(x.bits) << 16;
    }
};

typedef Number<T>::Wide Value;
typedef Vector<T, WIDTH, sizeof(T) == 2 && WIDTH % 2 == 0> Many;
typedef Pack<Value, WIDTH> Values;
const int BLOCK = 256;
// Blocks at once on a multiprocessor.
const int RESIDENT = 3;
// Rows that a thread sums before it adds to the f64.
const int RUN = 16;

struct Sums { f64 a, b; };

// Of each thread of a block the sums of its channels. A padding spreads the channels of a thread over the banks.
typedef Sums Table[WIDTH][BLOCK + 1];

// The vectors of a thread: those of one column in the rows first, first + step, ….
struct Walk {
    u32 rows, first, step, lane, lanes, columns;
    i64 packs, pack;

    __device__ __forceinline__ Walk(i64 rows, i64 channels, i64 columns)
        : rows(u32(rows)), columns(u32(columns)), packs(channels / WIDTH) {
        lanes = BLOCK / this->columns;
        lane = threadIdx.x / this->columns;
        step = gridDim.y * lanes;
        pack = i64(blockIdx.x) * columns + threadIdx.x % this->columns;
        bool is_idle = lane >= lanes || pack >= packs;
        first = is_idle ? this->rows : blockIdx.y * lanes + lane;
        if (is_idle) pack = 0;
    }
    __device__ __forceinline__ i64 place(u32 row) const { return i64(row) * packs + pack; }
    __device__ __forceinline__ i64 channel() const { return pack * WIDTH; }
};

template <bool WHOLE> __device__ __forceinline__ Many read(const T* x, i64 place) {
    if (WHOLE) return reinterpret_cast<const Many*>(x)[place];
    Many all = {};
    for (int j = 0; j < WIDTH; j++) all.set(j, x[place * WIDTH + j]);
    return all;
}

template <bool WHOLE> __device__ __forceinline__ void write(T* x, i64 place, const Many& all) {
    if (WHOLE) reinterpret_cast<Many*>(x)[place] = all;
    else for (int j = 0; j < WIDTH; j++) x[place * WIDTH + j] = all.at(j);
}

// Reads N rows of a thread from `row` on; behind the last one they are `none`.
template <bool WHOLE, int N>
__device__ __forceinline__ void read_rows(Many (&all)[N], const T* x, const Walk& at, u32 row, const Many& none) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        u32 r = row + i * at.step;
        all[i] = none;
        if (r < at.rows) all[i] = read<WHOLE>(x, at.place(r));
    }
}

__device__ __forceinline__ T plus(T a, T b) { return to(widen(a) + widen(b), T()); }

__device__ __forceinline__ void clear(Table& table) {
    for (int j = 0; j < WIDTH; j++) table[j][threadIdx.x] = {0, 0};
}

// Adds to the sums of a thread, which stay in shared memory between runs: the compiler would keep them in registers.
__device__ __forceinline__ void add(Table& table, int j, f64 a, f64 b) {
    volatile Sums& sums = table[j][threadIdx.x];
    sums.a = sums.a + a;
    sums.b = sums.b + b;
}

// Adds the sums of the lanes, and writes those of the block's part.
__device__ __forceinline__ void finish(Sums* parts, Table& table, const Walk& at, i64 channels) {
    for (u32 n = at.lanes, half; n > 1; n = half) {
        half = (n + 1) / 2;
        __syncthreads();
        if (at.lane + half >= n) continue;
        for (int j = 0; j < WIDTH; j++) {
            Sums other = table[j][threadIdx.x + half * at.columns];
            table[j][threadIdx.x].a += other.a;
            table[j][threadIdx.x].b += other.b;
        }
    }
    __syncthreads();
    i64 c = i64(blockIdx.x) * at.columns * WIDTH + threadIdx.x;
    if (threadIdx.x < at.columns * WIDTH && c < channels)
        parts[blockIdx.y * channels + c] = table[threadIdx.x % WIDTH][threadIdx.x / WIDTH];
}

// Sums of the differences from the first row, and of their squares.
template <bool WHOLE>
__device__ __forceinline__ void add_moments(Table& table, const T* x, const Walk& at) {
    const int ROWS = 4;
    for (u32 row = at.first; row < at.rows;) {
        Many origin = read<WHOLE>(x, at.place(row));
        Value a[WIDTH] = {}, b[WIDTH] = {};
        u32 n = 0;
#pragma unroll 1
        for (int i = 0; i < RUN && row < at.rows; i += ROWS, row += ROWS * at.step) {
            Many in[ROWS];
            read_rows<WHOLE>(in, x, at, row, origin);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                n += row + k * at.step < at.rows;
                for (int j = 0; j < WIDTH; j++) {
                    Value d = widen(in[k].at(j)) - widen(origin.at(j));
                    a[j] += d;
                    b[j] += d * d;
                }
            }
        }
        // From the run's first row to the first one of all.
        Many first = read<WHOLE>(x, at.pack);
        for (int j = 0; j < WIDTH; j++) {
            f64 away = f64(widen(origin.at(j))) - f64(widen(first.at(j))), sum = f64(a[j]), shift = n * away;
            add(table, j, sum + shift, f64(b[j]) + away * (2 * sum + shift));
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_parts(Sums* parts, const T* x, i64 rows, i64 channels, i64 columns) {
    __shared__ Table table;
    Walk at(rows, channels, columns);
    clear(table);
    if (aligned(x, sizeof(Many))) add_moments<true>(table, x, at);
    else add_moments<false>(table, x, at);
    finish(parts, table, at, channels);
}

// A ReLU of result y that the gradient passes where that is positive. What passes is written. Another gradient may be
// added to it before.
struct Gate {
    T* passed;
    const T* y;
    const T* other;
};

// Sums of dy, and of dy · (x - mean).
template <bool WHOLE, bool HAS_RELU, bool HAS_SUM>
__device__ __forceinline__ void add_gradients(Table& table, const T* dy, const T* x, const S* mean, Gate gate,
                                              const Walk& at) {
    const int ROWS = 2;
    Value middle[WIDTH];
    for (int j = 0; j < WIDTH; j++) middle[j] = Value(widen(mean[at.channel() + j]));
    for (u32 row = at.first; row < at.rows;) {
        Value a[WIDTH] = {}, b[WIDTH] = {};
#pragma unroll 1
        for (int i = 0; i < RUN && row < at.rows; i += ROWS, row += ROWS * at.step) {
            Many of_y[ROWS], of_x[ROWS], by[ROWS], term[ROWS];
            read_rows<WHOLE>(of_y, dy, at, row, Many{});
            read_rows<WHOLE>(of_x, x, at, row, Many{});
            if (HAS_RELU) read_rows<WHOLE>(by, gate.y, at, row, Many{});
            if (HAS_SUM) read_rows<WHOLE>(term, gate.other, at, row, Many{});
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                for (int j = 0; j < WIDTH; j++) {
                    T d = of_y[k].at(j);
                    if (HAS_SUM) d = plus(d, term[k].at(j));
                    if (HAS_RELU && !(widen(by[k].at(j)) > 0)) d = to(Value(0), T());
                    of_y[k].set(j, d);
                    a[j] += widen(d);
                    b[j] += widen(d) * (widen(of_x[k].at(j)) - middle[j]);
                }
                u32 r = row + k * at.step;
                if (HAS_RELU && r < at.rows) write<WHOLE>(gate.passed, at.place(r), of_y[k]);
            }
        }
        for (int j = 0; j < WIDTH; j++) add(table, j, f64(a[j]), f64(b[j]));
    }
}

template <bool HAS_RELU, bool HAS_SUM>
__device__ __forceinline__ void sum_gradients(Sums* parts, const T* dy, const T* x, const S* mean, Gate gate, i64 rows,
                                              i64 channels, i64 columns) {
    __shared__ Table table;
    Walk at(rows, channels, columns);
    clear(table);
    bool whole = aligned(x, sizeof(Many)) && aligned(dy, sizeof(Many)) && aligned(gate.passed, sizeof(Many)) &&
                 aligned(gate.y, sizeof(Many)) && aligned(gate.other, sizeof(Many));
    if (whole) add_gradients<true, HAS_RELU, HAS_SUM>(table, dy, x, mean, gate, at);
    else add_gradients<false, HAS_RELU, HAS_SUM>(table, dy, x, mean, gate, at);
    finish(parts, table, at, channels);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_grad_parts(Sums* parts, const T* dy, const T* x, const S* mean, i64 rows, i64 channels, i64 columns) {
    sum_gradients<false, false>(parts, dy, x, mean, Gate{}, rows, channels, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_relu_grad_parts(Sums* parts, T* passed, const T* dy, const T* x, const S* mean, const T* y, i64 rows,
                                i64 channels, i64 columns) {
    sum_gradients<true, false>(parts, dy, x, mean, Gate{passed, y, nullptr}, rows, channels, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_sum_relu_grad_parts(Sums* parts, T* passed, const T* dy, const T* x, const S* mean, const T* y,
                                    const T* other, i64 rows, i64 channels, i64 columns) {
    sum_gradients<true, true>(parts, dy, x, mean, Gate{passed, y, other}, rows, channels, columns);
}

// A block of `…_total` adds the parts of this many channels, each of them by TOTAL_LANES threads.
const int TOTAL_CHANNELS = 8;
const int TOTAL_LANES = 64;
const int TOTAL_BLOCK = TOTAL_CHANNELS * TOTAL_LANES;

__device__ __forceinline__ i64 total_channel() {
    return i64(blockIdx.x) * TOTAL_CHANNELS + threadIdx.x % TOTAL_CHANNELS;
}

// The sums of all parts of the thread's channel, in its first lane.
__device__ __forceinline__ Sums total(const Sums* parts, i64 n, i64 channels) {
    __shared__ Sums sums[TOTAL_BLOCK];
    i64 c = total_channel();
    int lane = threadIdx.x / TOTAL_CHANNELS;
    Sums all = {0, 0};
    if (c >= channels) n = 0;
#pragma unroll 4
    for (i64 i = lane; i < n; i += TOTAL_LANES) {
        Sums part = parts[i * channels + c];
        all.a += part.a;
        all.b += part.b;
    }
    sums[threadIdx.x] = all;
    for (int half = TOTAL_LANES / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane >= half) continue;
        Sums other = sums[threadIdx.x + half * TOTAL_CHANNELS];
        all.a += other.a;
        all.b += other.b;
        sums[threadIdx.x] = all;
    }
    return all;
}

// Mean and variance; for each channel the mean, the factor of what is left, and the bias.
extern "C" __global__ void __launch_bounds__(TOTAL_BLOCK)
batch_norm_last_total(Value* constants, S* mean_out, S* var_out, const Sums* parts, const T* x, const S* scale,
                      const S* bias, i64 n_parts, i64 rows, i64 channels, f64 eps) {
    i64 c = total_channel();
    Sums sums = total(parts, n_parts, channels);
    if (c >= channels || threadIdx.x >= TOTAL_CHANNELS) return;
    f64 n = f64(rows), away = sums.a / n;
    f64 mean = f64(widen(x[c])) + away, var = sums.b / n - away * away;
    if (var < 0) var = 0;
    constants[c] = Value(mean);
    constants[channels + c] = Value(f64(widen(scale[c])) / sqrt(var + eps));
    constants[2 * channels + c] = Value(widen(bias[c]));
    mean_out[c] = to(mean, S());
    var_out[c] = to(var, S());
}

// Gradients of scale and bias; for each channel the mean, the factor, what is subtracted from dy, and the slope of what
// is subtracted over x.
extern "C" __global__ void __launch_bounds__(TOTAL_BLOCK)
batch_norm_last_grad_total(Value* constants, S* dscale, S* dbias, const Sums* parts, const S* scale, const S* mean,
                           const S* var, i64 n_parts, i64 rows, i64 channels, f64 eps) {
    i64 c = total_channel();
    Sums sums = total(parts, n_parts, channels);
    if (c >= channels || threadIdx.x >= TOTAL_CHANNELS) return;
    f64 n = f64(rows), rstd = 1 / sqrt(f64(widen(var[c])) + eps), of_scale = sums.b * rstd;
    constants[c] = Value(widen(mean[c]));
    constants[channels + c] = Value(f64(widen(scale[c])) * rstd);
    constants[2 * channels + c] = Value(sums.a / n);
    constants[3 * channels + c] = Value(of_scale / n * rstd);
    dscale[c] = to(of_scale, S());
    dbias[c] = to(sums.a, S());
}

// The constants of a thread's channels, number `which` of each.
__device__ __forceinline__ Values constants_of(const Value* constants, int which, const Walk& at) {
    return *reinterpret_cast<const Values*>(constants + which * at.packs * WIDTH + at.channel());
}

// Calls `at_rows` with the first of every ROWS rows of a thread, from the last ones on.
template <int ROWS, class AtRows>
__device__ __forceinline__ void backward(const Walk& at, AtRows at_rows) {
    u32 step = ROWS * at.step, rounds = (at.rows - at.first + step - 1) / step;
    for (u32 row = at.first + rounds * step; rounds > 0; rounds--) at_rows(row -= step);
}

template <bool WHOLE, bool HAS_RELU, bool HAS_SUM>
__device__ __forceinline__ void normalize(T* y, const T* x, const T* other, const Value* constants, const Walk& at) {
    const int ROWS = 4;
    Values middle = constants_of(constants, 0, at), factor = constants_of(constants, 1, at);
    Values shift = constants_of(constants, 2, at);
    backward<ROWS>(at, [&](u32 row) {
        Many in[ROWS], term[ROWS];
        read_rows<WHOLE>(in, x, at, row, Many{});
        if (HAS_SUM) read_rows<WHOLE>(term, other, at, row, Many{});
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            Many out = {};
            for (int j = 0; j < WIDTH; j++) {
                T z = to((widen(in[k].at(j)) - middle.at[j]) * factor.at[j] + shift.at[j], T());
                if (HAS_SUM) z = plus(z, term[k].at(j));
                // A NaN stays one.
                if (HAS_RELU && widen(z) <= 0) z = to(Value(0), T());
                out.set(j, z);
            }
            u32 r = row + k * at.step;
            if (r < at.rows) write<WHOLE>(y, at.place(r), out);
        }
    });
}

template <bool HAS_RELU, bool HAS_SUM>
__device__ __forceinline__ void normalize(T* y, const T* x, const T* other, const Value* constants, i64 rows,
                                          i64 channels, i64 columns) {
    Walk at(rows, channels, columns);
    bool whole = aligned(x, sizeof(Many)) && aligned(y, sizeof(Many)) && aligned(other, sizeof(Many));
    if (whole) normalize<true, HAS_RELU, HAS_SUM>(y, x, other, constants, at);
    else normalize<false, HAS_RELU, HAS_SUM>(y, x, other, constants, at);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last(T* y, const T* x, const Value* constants, i64 rows, i64 channels, i64 columns) {
    normalize<false, false>(y, x, nullptr, constants, rows, channels, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_relu(T* y, const T* x, const Value* constants, i64 rows, i64 channels, i64 columns) {
    normalize<true, false>(y, x, nullptr, constants, rows, channels, columns);
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_sum_relu(T* y, const T* x, const T* other, const Value* constants, i64 rows, i64 channels, i64 columns) {
    normalize<true, true>(y, x, other, constants, rows, channels, columns);
}

// `dy` may be `dx`.
template <bool WHOLE>
__device__ __forceinline__ void differentiate(T* dx, const T* dy, const T* x, const Value* constants, const Walk& at) {
    const int ROWS = 2;
    Values middle = constants_of(constants, 0, at), factor = constants_of(constants, 1, at);
    Values shift = constants_of(constants, 2, at), slope = constants_of(constants, 3, at);
    backward<ROWS>(at, [&](u32 row) {
        Many of_y[ROWS], of_x[ROWS];
        read_rows<WHOLE>(of_y, dy, at, row, Many{});
        read_rows<WHOLE>(of_x, x, at, row, Many{});
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            Many out = {};
            for (int j = 0; j < WIDTH; j++) {
                Value left = (widen(of_x[k].at(j)) - middle.at[j]) * slope.at[j];
                out.set(j, to(factor.at[j] * (widen(of_y[k].at(j)) - shift.at[j] - left), T()));
            }
            u32 r = row + k * at.step;
            if (r < at.rows) write<WHOLE>(dx, at.place(r), out);
        }
    });
}

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
batch_norm_last_grad(T* dx, const T* dy, const T* x, const Value* constants, i64 rows, i64 channels, i64 columns) {
    Walk at(rows, channels, columns);
    bool whole = aligned(x, sizeof(Many)) && aligned(dy, sizeof(Many)) && aligned(dx, sizeof(Many));
    if (whole) differentiate<true>(dx, dy, x, constants, at);
    else differentiate<false>(dx, dy, x, constants, at);
}
