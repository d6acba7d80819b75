// Tiles of attention on tensor cores, shared by its kernels.
//
// To be defined: T (f16 or bf16); HEAD and VALUE, the sizes of a query and of a value, and D and E, the same rounded up
// to 16, filled with zeros; the parameters of the Layout of each operand and result; CAUSAL (0 or 1); WINDOW, the keys
// on either side visible to a query, counting itself, or 0 for all; MASK (NO_MASK, ADDED or KEPT) with elements MASK_T;
// FOLDED, whether scores are scaled inside the exponent (scale > 0 and no mask); COARSE and FILLED of the operation, if
// a mask is added; DROPOUT.

#include "tensor_cores.cuh"
#include "sight.cuh"
#include "dropout.cuh"

#define NO_MASK 0
#define ADDED 1
#define KEPT 2

const f32 LOG2_E = 1.4426950408889634f;
const f32 LN_2 = 0.6931471805599453f;
#define INFINITE __uint_as_float(0x7f800000)

// Sizes of an attention, and strides of the mask's elements, below 2^31 within a head.
struct Shape {
    i64 heads, groups, queries, keys;
    i64 mask_batch, mask_head, mask_query, mask_key;
};

// Starts loading N rows, of which `valid` exist, of SIZE elements, filled up with zeros to FULL.
// `whole` says that the operand begins at a multiple of 16 bytes.
template <class At, int N, int SIZE, int FULL, int THREADS>
__device__ __forceinline__ void load_tile(T* tile, const T* from, int valid, bool whole) {
    const int CHUNKS = FULL / 8;
    for (int i = threadIdx.x; i < N * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, column = i % CHUNKS * 8;
        T* to = tile + row * (FULL + PAD) + column;
        const T* source = from + i64(row) * At::ROW + column;
        if (SIZE % 8 == 0 && At::WHOLE && whole) {
            bool exists = row < valid && column < SIZE;
            copy_async(to, exists ? source : from, exists);
        } else {
            for (int j = 0; j < 8; j++) {
                bool exists = row < valid && column + j < SIZE;
                to[j] = exists ? source[j] : T{0};
            }
        }
    }
}

// The operand a of an MMA: 16 rows and 16 columns of a tile.
template <int FULL> __device__ __forceinline__ void load_a(u32 (&a)[4], const T* tile, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix(a, tile + (row + lane % 16) * (FULL + PAD) + column + lane / 16 * 8);
}

// The operand b of two MMAs of 8 columns each: 16 rows of a tile are its columns, 16 columns of the tile are the
// contracted axis.
template <int FULL> __device__ __forceinline__ void load_b(u32 (&b)[4], const T* tile, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix(b, tile + (row + lane / 16 * 8 + lane % 8) * (FULL + PAD) + column + lane / 8 % 2 * 8);
}

// The same with 16 rows of the tile as the contracted axis.
template <int FULL>
__device__ __forceinline__ void load_b_transposed(u32 (&b)[4], const T* tile, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix_transposed(b, tile + (row + lane % 16) * (FULL + PAD) + column + lane / 16 * 8);
}

// c[M·16 × N·8] = rows of `left` · (rows of `right`)ᵀ over SIZE columns.
template <int M, int N, int SIZE>
__device__ __forceinline__ void matmul(f32 (&c)[M][N][4], const T* left, const T* right) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][j][e] = 0;
    // With large heads, the operands of all steps would not fit the registers together with the accumulators.
#pragma unroll (SIZE > 128 ? 4 : SIZE / 16)
    for (int k = 0; k < SIZE; k += 16) {
        u32 a[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) load_a<SIZE>(a[i], left, i * 16, k);
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 b[4];
            load_b<SIZE>(b, right, j * 8, k);
#pragma unroll
            for (int i = 0; i < M; i++) {
                mma(c[i][j], a[i], b[0], b[1], T());
                mma(c[i][j + 1], a[i], b[2], b[3], T());
            }
        }
    }
}

// sum[M·16 × SIZE] += weights[M·16 × K·8] · rows of `right`, the weights rounded to T.
template <int M, int K, int SIZE>
__device__ __forceinline__ void accumulate(f32 (&sum)[M][SIZE / 8][4], const f32 (&weights)[M][K][4],
                                           const T* right) {
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        u32 a[M][4];
#pragma unroll
        for (int i = 0; i < M; i++) {
            a[i][0] = pair(weights[i][k][0], weights[i][k][1], T());
            a[i][1] = pair(weights[i][k][2], weights[i][k][3], T());
            a[i][2] = pair(weights[i][k + 1][0], weights[i][k + 1][1], T());
            a[i][3] = pair(weights[i][k + 1][2], weights[i][k + 1][3], T());
        }
#pragma unroll
        for (int j = 0; j < SIZE / 8; j += 2) {
            u32 b[4];
            load_b_transposed<SIZE>(b, right, k * 8, j * 8);
#pragma unroll
            for (int i = 0; i < M; i++) {
                mma(sum[i][j], a[i], b[0], b[1], T());
                mma(sum[i][j + 1], a[i], b[2], b[3], T());
            }
        }
    }
}

// Writes 16·M rows, of which `valid` exist, of SIZE elements.
template <class At, int M, int SIZE, int FULL>
__device__ __forceinline__ void store_rows(T* target, const f32 (&x)[M][FULL / 8][4], int valid) {
    int lane = threadIdx.x % 32;
    bool pairs = SIZE % 2 == 0 && At::ROW % 2 == 0 && aligned(target, 4);
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = i * 16 + half * 8 + lane / 4;
            if (row >= valid) continue;
#pragma unroll
            for (int j = 0; j < FULL / 8; j++) {
                int column = j * 8 + lane % 4 * 2;
                T* at = target + i64(row) * At::ROW + column;
                f32 low = x[i][j][half * 2], high = x[i][j][half * 2 + 1];
                if (pairs && column < SIZE) {
                    *reinterpret_cast<u32*>(at) = pair(low, high, T());
                } else {
                    if (column < SIZE) at[0] = to(low, T());
                    if (column + 1 < SIZE) at[1] = to(high, T());
                }
            }
        }
}

// The score of a dot product q · k, scaled and masked unless it is folded.
__device__ __forceinline__ f32 score(f32 dot, f32 scale, const MASK_T* mask) {
#if MASK == ADDED
    return fmaf(dot, scale, widen(*mask));
#elif MASK == KEPT
    return mask->bits ? dot * scale : -INFINITE;
#else
    return FOLDED ? dot : dot * scale;
#endif
}

// e^(scale · (score - origin)) of folded scores, e^(score - origin) of others.
__device__ __forceinline__ f32 power(f32 score, f32 origin, f32 scale) {
    if (FOLDED) return exp2_fast(fmaf(score, scale * LOG2_E, -origin * (scale * LOG2_E)));
    return exp2_fast((score - origin) * LOG2_E);
}

// e^(s - lse) for the dot product of a query and a key.
__device__ __forceinline__ f32 weight(f32 dot, f32 lse, f32 scale, const MASK_T* mask) {
    f32 s = score(dot, scale, mask);
    if (FOLDED) return exp2_fast(fmaf(s, scale * LOG2_E, -lse * LOG2_E));
    return exp2_fast((s - lse) * LOG2_E);
}

// Whether weights of a row must be divided by their sum, as its lse is coarse.
__device__ __forceinline__ bool is_coarse(f32 lse) {
#if MASK == ADDED
    return lse < COARSE;
#else
    return false;
#endif
}

// Whether every score of a row was replaced by a number that a mask adds, and so has no gradient.
__device__ __forceinline__ bool is_filled(f32 lse) {
#if MASK == ADDED
    return lse == f32(FILLED);
#else
    return false;
#endif
}

// The lse of a row for `weight`: rows without a key have zero weights.
__device__ __forceinline__ f32 row_lse(const f32* lse, i64 row, bool exists) {
    f32 x = exists ? lse[row] : -INFINITE;
    return x == -INFINITE ? INFINITE : x;
}
