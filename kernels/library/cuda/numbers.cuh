// Element types, by the names of the graph's text form. Kernels compute in the wide type of an element:
// f32 for floats up to f32, f64 for f64, i64 for integers.

typedef double f64;
typedef float f32;
typedef long long i64;
typedef int i32;
typedef short i16;
typedef signed char i8;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct b8 { u8 bits; };

template <class Element> struct Number;
template <> struct Number<f64> { typedef f64 Wide; };
template <> struct Number<f32> { typedef f32 Wide; };
template <> struct Number<f16> { typedef f32 Wide; };
template <> struct Number<bf16> { typedef f32 Wide; };
template <> struct Number<i64> { typedef i64 Wide; };
template <> struct Number<i32> { typedef i64 Wide; };
template <> struct Number<u8> { typedef i64 Wide; };
// Types of input data only: kernels read them and write the type to which they are widened.
template <> struct Number<i16> { typedef i64 Wide; };
template <> struct Number<i8> { typedef i64 Wide; };
template <> struct Number<u32> { typedef i64 Wide; };
template <> struct Number<u16> { typedef i64 Wide; };
template <> struct Number<b8> { typedef i64 Wide; };

__device__ __forceinline__ f32 bits_to_f32(u32 x) { return __uint_as_float(x); }

__device__ __forceinline__ f64 widen(f64 x) { return x; }
__device__ __forceinline__ f32 widen(f32 x) { return x; }
__device__ __forceinline__ f32 widen(f16 x) { return f16_to_f32(x.bits); }
__device__ __forceinline__ f32 widen(bf16 x) { return bits_to_f32(u32(x.bits) << 16); }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ i64 widen(i32 x) { return x; }
__device__ __forceinline__ i64 widen(u8 x) { return x; }
__device__ __forceinline__ i64 widen(i16 x) { return x; }
__device__ __forceinline__ i64 widen(i8 x) { return x; }
__device__ __forceinline__ i64 widen(u32 x) { return x; }
__device__ __forceinline__ i64 widen(u16 x) { return x; }
__device__ __forceinline__ i64 widen(b8 x) { return x.bits; }

// x as an f32 that rounds to every narrower float as x does: truncated, with the last bit set if inexact (round to
// odd).
__device__ __forceinline__ f32 to_odd(f64 x) {
    f32 y = __double2float_rz(x);
    u32 bits = __float_as_uint(y);
    if (x == x && f64(y) != x) bits |= 1;
    return bits_to_f32(bits);
}

// The nearest integer toward zero within the type's range; 0 for NaN.
__device__ __forceinline__ i64 truncate(f64 x, f64 least, f64 most, i64 low, i64 high) {
    if (!(x == x)) return 0;
    return x <= least ? low : x >= most ? high : i64(x);
}

// `to(x, T())`: x rounded once to T.
__device__ __forceinline__ f64 to(f64 x, f64) { return x; }
__device__ __forceinline__ f32 to(f64 x, f32) { return f32(x); }
__device__ __forceinline__ f16 to(f64 x, f16) { return f16{f32_to_f16(to_odd(x))}; }
__device__ __forceinline__ bf16 to(f64 x, bf16) { return bf16{f32_to_bf16(to_odd(x))}; }
__device__ __forceinline__ i64 to(f64 x, i64) {
    const i64 most = 0x7fffffffffffffffll;
    return truncate(x, -9223372036854775808.0, 9223372036854775808.0, -most - 1, most);
}
__device__ __forceinline__ i32 to(f64 x, i32) {
    return i32(truncate(x, -2147483648.0, 2147483647.0, -2147483647ll - 1, 2147483647ll));
}
__device__ __forceinline__ u8 to(f64 x, u8) { return u8(truncate(x, 0.0, 255.0, 0, 255)); }
__device__ __forceinline__ b8 to(f64 x, b8) { return b8{u8(x != 0.0)}; }

__device__ __forceinline__ f64 to(f32 x, f64) { return x; }
__device__ __forceinline__ f32 to(f32 x, f32) { return x; }
__device__ __forceinline__ f16 to(f32 x, f16) { return f16{f32_to_f16(x)}; }
__device__ __forceinline__ bf16 to(f32 x, bf16) { return bf16{f32_to_bf16(x)}; }
__device__ __forceinline__ i64 to(f32 x, i64) { return to(f64(x), i64()); }
__device__ __forceinline__ i32 to(f32 x, i32) { return to(f64(x), i32()); }
__device__ __forceinline__ u8 to(f32 x, u8) { return to(f64(x), u8()); }
__device__ __forceinline__ b8 to(f32 x, b8) { return b8{u8(x != 0.0f)}; }

__device__ __forceinline__ f64 to(i64 x, f64) { return f64(x); }
__device__ __forceinline__ f32 to(i64 x, f32) { return f32(f64(x)); }
__device__ __forceinline__ f16 to(i64 x, f16) { return to(f64(x), f16()); }
__device__ __forceinline__ bf16 to(i64 x, bf16) { return to(f64(x), bf16()); }
__device__ __forceinline__ i64 to(i64 x, i64) { return x; }
__device__ __forceinline__ i32 to(i64 x, i32) { return i32(x); }
__device__ __forceinline__ u8 to(i64 x, u8) { return u8(x); }
__device__ __forceinline__ b8 to(i64 x, b8) { return b8{u8(x != 0)}; }

// Elements of one access.
template <class Element, int N> struct __align__(sizeof(Element) * N) Pack { Element at[N]; };
typedef Pack<u32, 4> u128;

// Moves a vector by one access, or by its elements where an address is not aligned.
template <class Small, class Large>
__device__ __forceinline__ void move(Large* to, const Large* from, bool whole) {
    if (whole) {
        *to = *from;
        return;
    }
    for (int i = 0; i < int(sizeof(Large) / sizeof(Small)); i++)
        reinterpret_cast<Small*>(to)[i] = reinterpret_cast<const Small*>(from)[i];
}

__device__ __forceinline__ bool aligned(const void* p, u32 bytes) { return u64(p) % bytes == 0; }

// A grid of elements in memory: sizes and strides of its axes, outermost first.
const int MAX_AXES = 8;
struct Axes {
    i64 count;
    i64 sizes[MAX_AXES];
    i64 strides[MAX_AXES];

    // The offset of element `index` of `n`. 64-bit division is slow, so only large grids use it.
    __device__ __forceinline__ i64 place(i64 index, i64 n) const {
        return n <= 0x7fffffff ? walk<u32>(u32(index)) : walk<u64>(u64(index));
    }

    template <class Index> __device__ __forceinline__ i64 walk(Index index) const {
        i64 at = 0;
        for (int axis = int(count) - 1; axis > 0; axis--) {
            Index size = Index(sizes[axis]), next = index / size;
            at += i64(index - next * size) * strides[axis];
            index = next;
        }
        return count > 0 ? at + i64(index) * strides[0] : 0;
    }
};

// The layout of an operand of attention: strides of batches, heads and rows, in elements. The elements of a row are
// contiguous.
template <i64 PER_BATCH, i64 PER_HEAD, i64 PER_ROW> struct Layout {
    static const i64 ROW = PER_ROW;
    // Whether every row begins at a multiple of 16 bytes if the first does, for elements of 2 bytes.
    static const bool WHOLE = PER_BATCH % 8 == 0 && PER_HEAD % 8 == 0 && PER_ROW % 8 == 0;

    static __device__ __forceinline__ i64 at(i64 batch, i64 head, i64 row) {
        return batch * PER_BATCH + head * PER_HEAD + row * PER_ROW;
    }
};

__device__ __forceinline__ i64 global_thread() {
    return i64(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ i64 global_threads() { return i64(gridDim.x) * blockDim.x; }

// Report of an index outside its axis, which the host reads after the step.
struct Fault {
    u64 raised;
    i64 index;
    i64 size;
};

// The position of `index` among `size` elements, negative ones counted from the end; -1, with the fault reported, if it
// is out of range.
__device__ __forceinline__ i64 resolve(i64 index, i64 size, Fault* fault) {
    i64 place = index < 0 ? index + size : index;
    if (place >= 0 && place < size) return place;
    if (atomicCAS(&fault->raised, 0ull, 1ull) == 0) {
        fault->index = index;
        fault->size = size;
    }
    return -1;
}
