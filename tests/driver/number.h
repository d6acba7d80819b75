// Elements of tensors as double precision.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

template <class T> T read(const void* at) { T x; memcpy(&x, at, sizeof x); return x; }
template <class T> void write(void* at, T x) { memcpy(at, &x, sizeof x); }

inline double load_bf16(const void* at) {
    u32 bits = u32(read<u16>(at)) << 16;
    return read<float>(&bits);
}
inline void store_bf16(void* at, double x) {
    float single = float(x);
    u32 bits = read<u32>(&single);
    write(at, x != x ? u16(0x7fff) : u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}
inline double load_f16(const void* at) {
    u16 bits = read<u16>(at);
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25));
}
inline void store_f16(void* at, double x) {
    u16 sign = std::signbit(x) ? 0x8000 : 0;
    double size = std::fabs(x);
    if (x != x) return write(at, u16(0x7fff));
    if (size >= 65520) return write(at, u16(sign | 0x7c00));
    // Rounded to 11 bits, or to 2^-24 below the normal range.
    int exponent;
    std::frexp(size, &exponent);
    if (exponent < -13) exponent = -13;
    u32 units = u32(std::nearbyint(std::ldexp(size, 11 - exponent)));
    // A carry moves into the exponent by itself.
    write(at, u16(sign | (units < 1024 ? units : (u32(exponent + 14) << 10) + units - 1024)));
}
