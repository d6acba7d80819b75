// Number of elements that are infinite or NaN, and the digits of the exact Σ x² of many arrays, each of 16 bits, the first
// of weight 2⁻³⁰⁴: `exact_parts` computes those of a block, a part of one array, without carries; `exact_total` adds them.
// Only integers are added, so that no order of additions changes a digit.
//
// To be defined: T, the elements, floats of at most 32 bits; ARRAYS, how many arrays a launch reads.

#include "arrays.cuh"

const int DIGITS = 40;
// The digits, then the number of elements that are not finite.
const int WORDS = DIGITS + 1;
// Sums by exponent: as many as a block has threads.
const int EXPONENTS = 256, BLOCK = EXPONENTS;
// An element is the integer m, below 2²⁴, times 2^(e − 150): m² is added in pieces of 16 bits, of which 32 bits hold the sum
// of a chunk.
const int PIECES = 3;
const i64 CHUNK = 1 << 16;
// Sums of the same, for neighboring lanes, which would otherwise wait for one another.
const int COPIES = 4;
// Elements that a thread reads before it adds them.
const int AHEAD = 8;

typedef u32 Sums[PIECES][EXPONENTS][COPIES];

__device__ __forceinline__ void add(Sums& sums, f32 x) {
    u32 bits = __float_as_uint(x), e = bits >> 23 & 255;
    // A subnormal number has the exponent of the least normal one, without its leading bit.
    u64 m = (bits & 0x7fffff) | u32(e > 0) << 23;
    u64 square = e == EXPONENTS - 1 ? 1 : m * m;
    if (square == 0) return;
    for (int i = 0; i < PIECES; i++) {
        u32 piece = u32(square >> 16 * i) & 0xffff;
        if (piece != 0) atomicAdd(&sums[i][e > 0 ? e : 1][threadIdx.x % COPIES], piece);
    }
}

// Adds the sum of the exponent `e` of a chunk to the digits.
__device__ __forceinline__ void put(u64* words, int e, u64 sum) {
    if (e == EXPONENTS - 1) {
        atomicAdd(&words[DIGITS], sum);
        return;
    }
    // 2e − 300 = −304 + 16 · place + shift
    int place = (2 * e + 4) / 16, shift = (2 * e + 4) % 16;
    u64 low = sum << shift, high = shift > 0 ? sum >> (64 - shift) : 0;
    for (int i = 0; i < 4; i++) atomicAdd(&words[place + i], low >> 16 * i & 0xffff);
    atomicAdd(&words[place + 4], high);
}

extern "C" __global__ void __launch_bounds__(BLOCK) exact_parts(u64* parts, Arrays arrays, Sizes sizes) {
    __shared__ Sums sums;
    __shared__ u64 words[WORDS];
    Share share = share_of_block(arrays, sizes);
    int t = int(threadIdx.x);
    if (t < WORDS) words[t] = 0;
    for (i64 first = share.block * CHUNK; first < share.n; first += share.blocks * CHUNK) {
        for (int i = 0; i < PIECES; i++)
            for (int copy = 0; copy < COPIES; copy++) sums[i][t][copy] = 0;
        __syncthreads();
        i64 end = first + CHUNK < share.n ? first + CHUNK : share.n;
        for (i64 at = first + t; at < end; at += BLOCK * AHEAD) {
            f32 x[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) x[j] = at + j * BLOCK < end ? widen(share.x[at + j * BLOCK]) : 0.0f;
#pragma unroll
            for (int j = 0; j < AHEAD; j++) add(sums, x[j]);
        }
        __syncthreads();
        u64 sum = 0;
        for (int i = 0; i < PIECES; i++)
            for (int copy = 0; copy < COPIES; copy++) sum += u64(sums[i][t][copy]) << 16 * i;
        put(words, t, sum);
        __syncthreads();
    }
    if (t < WORDS) parts[i64(blockIdx.x) * WORDS + t] = words[t];
}

// The result is the number of elements that are not finite, then the digits.
extern "C" __global__ void __launch_bounds__(BLOCK) exact_total(f32* result, const u64* parts, i64 n) {
    __shared__ u64 words[WORDS];
    const int ROWS = BLOCK / WORDS;
    int t = int(threadIdx.x), row = t / WORDS, word = t % WORDS;
    if (t < WORDS) words[t] = 0;
    __syncthreads();
    u64 sum = 0;
    if (row < ROWS) {
        for (i64 i = row; i < n; i += ROWS) sum += parts[i * WORDS + word];
        atomicAdd(&words[word], sum);
    }
    __syncthreads();
    if (t > 0) return;
    result[0] = f32(words[DIGITS]);
    u64 carry = 0;
    for (int i = 0; i < DIGITS; i++) {
        u64 digit = words[i] + carry;
        result[1 + i] = f32(digit & 0xffff);
        carry = digit >> 16;
    }
}
