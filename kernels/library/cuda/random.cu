// Random numbers and masks. Inexact operations are rounded one by one, as on the CPU.

#include "philox.cuh"

// Writes `of` applied to the words of every element.
template <class T, class Of>
__device__ __forceinline__ void draw(T* out, const i64* state, i64 n, i64 id, const Of& of) {
    u64 first = first_number(state, n), key = u64(state[0]);
    i64 skip = i64(first % 4);
    for (i64 block = global_thread(); block * 4 < skip + n; block += global_threads()) {
        Pack<T, 4> four;
        of(philox(first / 4 + u64(block), u32(id), key), four.at);
        i64 begin = block * 4 - skip;
        if (begin >= 0 && begin + 4 <= n && aligned(out + begin, sizeof(four)))
            *reinterpret_cast<Pack<T, 4>*>(out + begin) = four;
        else
            for (int i = 0; i < 4; i++)
                if (begin + i >= 0 && begin + i < n) out[begin + i] = four.at[i];
    }
}

struct Below {
    i64 limit;
    __device__ __forceinline__ void operator()(const Four& words, u8* out) const {
        for (int i = 0; i < 4; i++) out[i] = i64(words.at[i]) < limit;
    }
};

__device__ __forceinline__ f32 times(f32 x, f32 y) { return __fmul_rn(x, y); }
__device__ __forceinline__ f32 plus(f32 x, f32 y) { return __fadd_rn(x, y); }

// offset + scale * z, at most `most`.
struct Affine {
    f32 offset, scale, most;
    __device__ __forceinline__ f32 of(f32 z) const {
        f32 y = plus(offset, times(scale, z));
        return y < most ? y : most;
    }
};

// In the open interval from 0 to 1.
struct Uniform {
    Affine affine;
    __device__ __forceinline__ void operator()(const Four& words, f32* out) const {
        for (int i = 0; i < 4; i++)
            out[i] = affine.of(times(f32(2 * (words.at[i] >> 9) + 1), bits_to_f32(0x33800000u)));
    }
};

// The logarithm of x over 2^32; with x = 2^e (1 + f) and s = f / (2 + f), (e - 32) ln 2 + 2 artanh s.
__device__ __forceinline__ f32 log_unit(f32 x) {
    u32 bits = __float_as_uint(x), exponent = (bits - 0x3f3504f3u) >> 23;
    f32 f = plus(bits_to_f32(bits - (exponent << 23)), -1.0f), s = __fdiv_rn(f, plus(2.0f, f)), q = times(s, s);
    f32 tail = plus(0.6666667f, times(q, plus(0.4f, times(q, plus(0.2857143f, times(q, 0.22222222f))))));
    f32 e = plus(f32(exponent), -32.0f);
    f32 low = plus(times(s, times(q, tail)), times(e, -2.1219444e-4f));
    return plus(times(e, 0.6933594f), plus(times(2.0f, s), low));
}

// Box-Muller transform: the nearest quarter of a turn, and the series of the remainder.
__device__ __forceinline__ void normal_pair(u32 u, u32 v, f32* out) {
    f32 radius = __fsqrt_rn(times(-2.0f, log_unit(f32(u | 1))));
    u32 quarter = (v + (1u << 29)) >> 30;
    f32 x = times(f32(i32(v - (quarter << 30))), 1.4629181e-9f), q = times(x, x);
    f32 s = plus(8.3333333e-3f, times(q, plus(-1.984127e-4f, times(q, 2.7557319e-6f))));
    s = plus(x, times(x, times(q, plus(-0.16666667f, times(q, s)))));
    f32 c = plus(-1.3888889e-3f, times(q, plus(2.4801587e-5f, -times(q, 2.755732e-7f))));
    c = times(times(q, q), plus(4.1666667e-2f, times(q, c)));
    c = plus(plus(1.0f, -times(q, 0.5f)), c);
    f32 cos = quarter == 0 ? c : quarter == 1 ? -s : quarter == 2 ? -c : s;
    f32 sin = quarter == 0 ? s : quarter == 1 ? c : quarter == 2 ? -s : -c;
    out[0] = times(radius, cos);
    out[1] = times(radius, sin);
}

struct Normal {
    Affine affine;
    __device__ __forceinline__ void operator()(const Four& words, f32* out) const {
        normal_pair(words.at[0], words.at[1], out);
        normal_pair(words.at[2], words.at[3], out + 2);
        for (int i = 0; i < 4; i++) out[i] = affine.of(out[i]);
    }
};

extern "C" __global__ void random_mask(u8* mask, const i64* state, i64 n, i64 id, i64 limit) {
    draw(mask, state, n, id, Below{limit});
}

extern "C" __global__ void random_uniform(f32* out, const i64* state, i64 n, i64 id, f64 offset, f64 scale, f64 most) {
    draw(out, state, n, id, Uniform{{f32(offset), f32(scale), f32(most)}});
}

extern "C" __global__ void random_normal(f32* out, const i64* state, i64 n, i64 id, f64 offset, f64 scale, f64 most) {
    draw(out, state, n, id, Normal{{f32(offset), f32(scale), f32(most)}});
}
