// Rounding to 8-bit floats, with one scale for all elements.
//
// The scale is the largest power of two that brings the recent amax, recent[index], to at most the largest number;
// without history (index < 0, or zero) the amax of x itself, which `magnitude` computes first. An amax covers finite
// elements and is stored as the bits of an f32, so that it can be compared as an integer.
//
// To be defined: FROM, the elements; E5M2, 1 or 0 for e4m3; VALUES, 1 to write rounded values as FROM divided by the
// scale, 0 to write codes; LATEST, 1 if `latest` receives the amax of x.

const int FRACTION = E5M2 ? 2 : 3;
// Exponent of the smallest normal number, the largest number and its code.
const int LEAST = E5M2 ? -14 : -6;
const f32 LARGEST = E5M2 ? 57344.0f : 448.0f;
const u32 MOST = E5M2 ? 0x7b : 0x7e;
const u32 INFINITE = E5M2 ? 0x7c : 0x7f;
// Significand bits of an f32 that are dropped, and the exponent bias difference.
const int CUT = 23 - FRACTION;
const u32 BIAS = u32(127 + LEAST - 1) << FRACTION;
const u32 F32_INFINITE = 0x7f800000;

const int BLOCK = 256;
const int WIDTH = 16 / sizeof(FROM);
// Rows and columns of the tile that a block transposes; rows are padded to lie in different banks, at whole words.
const int TILE = 64;
const int PITCH = TILE + 4;

#if VALUES
typedef FROM Out;
#else
typedef u8 Out;
#endif

// 2 to the power of e, which must be that of a normal number.
__device__ __forceinline__ f32 power(int e) { return bits_to_f32(u32(127 + e) << 23); }

__device__ __forceinline__ int scale_exponent(const f32* recent, const u32* amax, i64 index) {
    f32 known = index >= 0 ? recent[index] : 0.0f;
    if (!(known > 0.0f)) known = bits_to_f32(*amax);
    if (!(known > 0.0f) || __float_as_uint(known) >= F32_INFINITE) return 0;
    int e = int(__float_as_uint(LARGEST / known) >> 23) - 127;
    return e < -126 ? -126 : e > 100 ? 100 : e;
}

__device__ __forceinline__ u32 code_of(f32 x, f32 scale) {
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size >= F32_INFINITE) return sign | (size == F32_INFINITE ? INFINITE : 0x7f);
    f32 y = bits_to_f32(size) * scale;
    if (y >= LARGEST) return sign | MOST;
    // Subnormal numbers, in units of the smallest; the addition rounds.
    if (y < power(LEAST)) return sign | (__float_as_uint(y * power(FRACTION - LEAST) + 8388608.0f) & 0xff);
    size = __float_as_uint(y);
    size += (1u << (CUT - 1)) - 1 + (size >> CUT & 1);
    return sign | ((size >> CUT) - BIAS);
}

__device__ __forceinline__ f32 value_of(u32 code) {
    u32 size = code & 0x7f, sign = (code & 0x80) << 24;
    if (size > MOST) return bits_to_f32(sign | F32_INFINITE | (E5M2 && size == INFINITE ? 0 : 1 << 22));
    if (size >> FRACTION == 0) return bits_to_f32(sign | __float_as_uint(f32(size) * power(LEAST - FRACTION)));
    return bits_to_f32(sign | (size + BIAS) << CUT);
}

__device__ __forceinline__ u8 written(u32 code, f32, u8) { return u8(code); }
template <class T> __device__ __forceinline__ T written(u32 code, f32 inverse, T) {
    return to(value_of(code) * inverse, T());
}

__device__ __forceinline__ u32 magnitude_of(f32 x) {
    u32 size = __float_as_uint(x) & 0x7fffffff;
    return size < F32_INFINITE ? size : 0;
}

// Merges the maximum over all threads into `most`.
__device__ __forceinline__ void join(u32* most, u32 mine) {
    __shared__ u32 parts[BLOCK / 32];
    for (int mask = 16; mask > 0; mask /= 2) {
        u32 other = __shfl_xor_sync(~0u, mine, mask);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < BLOCK / 32; i++) mine = parts[i] > mine ? parts[i] : mine;
    atomicMax(most, mine);
}

// The amax of x, if there is no history; *amax must be zero.
extern "C" __global__ void __launch_bounds__(BLOCK)
magnitude(u32* amax, const FROM* x, const f32* recent, i64 index, i64 n) {
    if (index >= 0 && recent[index] > 0.0f) return;
    typedef Pack<FROM, WIDTH> In;
    u32 most = 0;
    i64 whole = aligned(x, sizeof(In)) ? n / WIDTH : 0;
    for (i64 i = global_thread(); i < whole; i += global_threads()) {
        In in = reinterpret_cast<const In*>(x)[i];
        for (int j = 0; j < WIDTH; j++) {
            u32 one = magnitude_of(widen(in.at[j]));
            most = one > most ? one : most;
        }
    }
    for (i64 i = whole * WIDTH + global_thread(); i < n; i += global_threads()) {
        u32 one = magnitude_of(widen(x[i]));
        most = one > most ? one : most;
    }
    join(amax, most);
}

// y = quantized x; *inverse is the factor of the codes.
extern "C" __global__ void __launch_bounds__(BLOCK)
quantize(Out* y, f32* inverse, u32* latest, const FROM* x, const f32* recent, const u32* amax, i64 index, i64 n) {
    typedef Pack<FROM, WIDTH> In;
    typedef Pack<Out, WIDTH> Packed;
    int e = scale_exponent(recent, amax, index);
    f32 scale = power(e), back = power(-e);
    if (global_thread() == 0) *inverse = back;
    u32 most = 0;
    i64 whole = aligned(x, sizeof(In)) && aligned(y, sizeof(Packed)) ? n / WIDTH : 0;
    for (i64 i = global_thread(); i < whole; i += global_threads()) {
        In in = reinterpret_cast<const In*>(x)[i];
        Packed out;
        for (int j = 0; j < WIDTH; j++) {
            f32 v = widen(in.at[j]);
            u32 one = magnitude_of(v);
            most = one > most ? one : most;
            out.at[j] = written(code_of(v, scale), back, Out());
        }
        reinterpret_cast<Packed*>(y)[i] = out;
    }
    for (i64 i = whole * WIDTH + global_thread(); i < n; i += global_threads()) {
        f32 v = widen(x[i]);
        u32 one = magnitude_of(v);
        most = one > most ? one : most;
        y[i] = written(code_of(v, scale), back, Out());
    }
    if (LATEST) join(latest, most);
}

// The same for a matrix, y[column][row] of x[row][column]. Rows are a multiple of four.
extern "C" __global__ void __launch_bounds__(BLOCK)
quantize_transposed(u8* y, f32* inverse, u32* latest, const FROM* x, const f32* recent, const u32* amax, i64 index,
                    i64 rows, i64 columns) {
    __shared__ u32 tile[TILE][PITCH / 4];
    int e = scale_exponent(recent, amax, index);
    f32 scale = power(e);
    if (global_thread() == 0) *inverse = power(-e);
    u32 most = 0;
    i64 across = (columns + TILE - 1) / TILE, tiles = (rows + TILE - 1) / TILE * across;
    for (i64 at = blockIdx.x; at < tiles; at += gridDim.x) {
        i64 top = at / across * TILE, left = at % across * TILE;
        for (int i = threadIdx.x; i < TILE * TILE; i += BLOCK) {
            i64 row = top + i / TILE, column = left + i % TILE;
            if (row >= rows || column >= columns) continue;
            f32 v = widen(x[row * columns + column]);
            u32 one = magnitude_of(v);
            most = one > most ? one : most;
            reinterpret_cast<u8*>(tile[i % TILE])[i / TILE] = u8(code_of(v, scale));
        }
        __syncthreads();
        for (int i = threadIdx.x; i < TILE * TILE / 4; i += BLOCK) {
            int column = i / (TILE / 4), row = i % (TILE / 4) * 4;
            if (left + column < columns && top + row < rows)
                *reinterpret_cast<u32*>(&y[(left + column) * rows + top + row]) = tile[column][row / 4];
        }
        __syncthreads();
    }
    if (LATEST) join(latest, most);
}
