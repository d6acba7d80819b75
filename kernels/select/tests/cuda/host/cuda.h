// CUDA C++ on a CPU, one block after the other: every thread of a block is a fiber that runs until it
// waits for others. `ptx.cuh` of the kernels is replaced by the functions below.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __restrict__
#define EXPORTED __attribute__((visibility("default")))
#define DYNAMIC_SHARED(name) u8* name = host::dynamic_shared

struct dim3 { u32 x, y, z; };

namespace host {
extern dim3 thread, block, threads, blocks;
extern u8* dynamic_shared;

void barrier();
// Meets the other 31 lanes; `work` then runs once, with all lanes' arguments.
void meet(const char* what, void* argument, void (*work)(void** arguments));
void copy_async(void* to, const void* from, u32 bytes);
void copy_async_commit();
void copy_async_wait(u32 pending);
void run(const u32* grid, u32 block, u32 shared, bool reversed, void (*body)(void*), void* context);

template <class... A> struct Call {
    void (*kernel)(A...);
    void** arguments;
    template <size_t... I> void with(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
    }
};

template <class... A>
void launch(void (*kernel)(A...), const u32* grid, u32 block, u32 shared, bool reversed, void** arguments) {
    Call<A...> call{kernel, arguments};
    auto body = [](void* c) { static_cast<Call<A...>*>(c)->with(std::index_sequence_for<A...>()); };
    run(grid, block, shared, reversed, body, &call);
}

inline u32 bits(float x) { u32 b; memcpy(&b, &x, 4); return b; }
inline float value(u32 b) { float x; memcpy(&x, &b, 4); return x; }
} // namespace host

#define threadIdx host::thread
#define blockIdx host::block
#define blockDim host::threads
#define gridDim host::blocks

inline void __syncthreads() { host::barrier(); }
inline void __syncwarp() { host::meet("syncwarp", nullptr, [](void**) {}); }

inline u32 __float_as_uint(float x) { return host::bits(x); }
inline float __uint_as_float(u32 x) { return host::value(x); }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline float __double2float_rz(double x) {
    float y = float(x);
    return std::fabs(double(y)) > std::fabs(x) && x == x ? std::nextafter(y, 0.0f) : y;
}
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
inline u32 __popc(u32 x) { return u32(__builtin_popcount(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(u32(x)); }
inline void __threadfence() {}

template <class T> T atomicAdd(T* at, T x) { T old = *at; *at = old + x; return old; }
template <class T> T atomicCAS(T* at, T expected, T x) {
    T old = *at;
    if (old == expected) *at = x;
    return old;
}
template <class T> T atomicMax(T* at, T x) { T old = *at; if (x > old) *at = x; return old; }

namespace host {
template <class T> struct Shuffle { T value; u32 source; T result; };
template <class T> T shuffle(const char* what, T x, u32 source) {
    Shuffle<T> mine{x, source, x};
    meet(what, &mine, [](void** all) {
        for (int lane = 0; lane < 32; lane++) {
            auto* s = static_cast<Shuffle<T>*>(all[lane]);
            s->result = static_cast<Shuffle<T>*>(all[s->source])->value;
        }
    });
    return mine.result;
}
inline u32 lane() { return thread.x % 32; }
} // namespace host

template <class T> T __shfl_sync(u32, T x, int from) { return host::shuffle("shfl", x, u32(from) % 32); }
template <class T> T __shfl_xor_sync(u32, T x, int mask) {
    return host::shuffle("shfl_xor", x, host::lane() ^ u32(mask));
}
template <class T> T __shfl_up_sync(u32, T x, u32 n) {
    return host::shuffle("shfl_up", x, host::lane() < n ? host::lane() : host::lane() - n);
}
template <class T> T __shfl_down_sync(u32, T x, u32 n) {
    return host::shuffle("shfl_down", x, host::lane() + n > 31 ? host::lane() : host::lane() + n);
}
inline u32 __ballot_sync(u32, int x) {
    struct Vote { int value; u32 result; } mine{x, 0};
    host::meet("ballot", &mine, [](void** all) {
        u32 votes = 0;
        for (int lane = 0; lane < 32; lane++)
            votes |= u32(static_cast<Vote*>(all[lane])->value != 0) << lane;
        for (int lane = 0; lane < 32; lane++) static_cast<Vote*>(all[lane])->result = votes;
    });
    return mine.result;
}

// The functions of `ptx.cuh`.

inline float f16_to_f32(u16 h) {
    u32 sign = u32(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return host::value(sign | 0x7f800000 | fraction << 13);
    float magnitude = exponent == 0 ? std::ldexp(float(fraction), -24)
                                    : std::ldexp(float(fraction + 1024), int(exponent) - 25);
    return sign ? -magnitude : magnitude;
}
inline u16 f32_to_f16(float x) {
    u16 sign = u16(host::bits(x) >> 16 & 0x8000);
    float a = std::fabs(x);
    if (x != x) return 0x7fff;
    if (a >= 65520.0f) return sign | 0x7c00;
    int exponent;
    std::frexp(a, &exponent);
    if (exponent < -13) exponent = -13;
    // Rounded to 11 bits, to 2^-24 below the normal range; nearbyint rounds to even.
    float unit = std::ldexp(1.0f, exponent - 11);
    float rounded = std::nearbyint(a / unit) * unit;
    if (rounded < std::ldexp(1.0f, -14)) return sign | u16(std::ldexp(rounded, 24));
    std::frexp(rounded, &exponent);
    u32 fraction = u32(std::ldexp(rounded, 11 - exponent)) & 1023;
    return sign | u16(u32(exponent + 14) << 10 | fraction);
}
inline u16 f32_to_bf16(float x) {
    if (x != x) return 0x7fff;
    u32 b = host::bits(x);
    return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline u32 f32_to_f16x2(float low, float high) { return f32_to_f16(low) | u32(f32_to_f16(high)) << 16; }
inline u32 f32_to_bf16x2(float low, float high) {
    return f32_to_bf16(low) | u32(f32_to_bf16(high)) << 16;
}
inline float exp2_fast(float x) { return std::exp2(x); }

namespace host {
struct Rows { const void* row; u32 result[4]; };
template <bool TRANSPOSED> void load_matrices(void** all) {
    for (int l = 0; l < 32; l++) {
        for (int m = 0; m < 4; m++) {
            u16 pair[2];
            for (int i = 0; i < 2; i++) {
                int r = TRANSPOSED ? l % 4 * 2 + i : l / 4, c = TRANSPOSED ? l / 4 : l % 4 * 2 + i;
                const void* row = static_cast<Rows*>(all[m * 8 + r])->row;
                if (uintptr_t(row) % 16 != 0) __builtin_trap();
                memcpy(&pair[i], static_cast<const u16*>(row) + c, 2);
            }
            static_cast<Rows*>(all[l])->result[m] = pair[0] | u32(pair[1]) << 16;
        }
    }
}
struct Product { float* c; const u32* a; u32 b[2]; };
template <class Read> void multiply(void** all, Read read) {
    auto half = [&](u32 word, int i) { return read(u16(word >> 16 * i)); };
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
        auto* p = static_cast<Product*>(all[l]);
        for (int i = 0; i < 2; i++) {
            for (int j = 0; j < 4; j++)
                a[l / 4 + j % 2 * 8][l % 4 * 2 + i + j / 2 * 8] = half(p->a[j], i);
            for (int j = 0; j < 2; j++) b[l % 4 * 2 + i + j * 8][l / 4] = half(p->b[j], i);
        }
    }
    for (int l = 0; l < 32; l++) {
        float* c = static_cast<Product*>(all[l])->c;
        for (int j = 0; j < 4; j++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += a[l / 4 + j / 2 * 8][k] * b[k][l % 4 * 2 + j % 2];
            c[j] += sum;
        }
    }
}
} // namespace host

inline void ldmatrix(u32 (&r)[4], const void* row) {
    host::Rows mine{row, {}};
    host::meet("ldmatrix", &mine, host::load_matrices<false>);
    memcpy(r, mine.result, 16);
}
inline void ldmatrix_transposed(u32 (&r)[4], const void* row) {
    host::Rows mine{row, {}};
    host::meet("ldmatrix.trans", &mine, host::load_matrices<true>);
    memcpy(r, mine.result, 16);
}
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::Product mine{c, a, {b0, b1}};
    host::meet("mma.bf16", &mine, [](void** all) {
        host::multiply(all, [](u16 x) { return host::value(u32(x) << 16); });
    });
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::Product mine{c, a, {b0, b1}};
    host::meet("mma.f16", &mine, [](void** all) { host::multiply(all, f16_to_f32); });
}
inline void copy_async(void* shared, const void* global, bool valid) {
    if (uintptr_t(shared) % 16 != 0 || (valid && uintptr_t(global) % 16 != 0)) __builtin_trap();
    host::copy_async(shared, valid ? global : nullptr, 16);
}
inline void copy_async_cached(void* shared, const void* global, bool valid) {
    copy_async(shared, global, valid);
}
inline void copy_async_commit() { host::copy_async_commit(); }
template <int N> void copy_async_wait() { host::copy_async_wait(N); }
