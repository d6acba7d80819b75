// Windows that slide over images of RANK spatial axes.

struct Window {
    i64 input[RANK], output[RANK], taps[RANK], strides[RANK], dilations[RANK], low[RANK];

    __device__ __forceinline__ static i64 product(const i64* sizes) {
        i64 n = 1;
        for (int i = 0; i < RANK; i++) n *= sizes[i];
        return n;
    }
    // 64-bit division is slow, so only large numbers use it.
    __device__ __forceinline__ static i64 quotient(i64 x, i64 by) {
        return u64(x | by) >> 32 == 0 ? i64(u32(x) / u32(by)) : x / by;
    }
    __device__ __forceinline__ static void split(i64 index, const i64* sizes, i64* at) {
        for (int i = RANK - 1; i >= 0; i--) {
            i64 next = quotient(index, sizes[i]);
            at[i] = index - next * sizes[i];
            index = next;
        }
    }
    // The element under a tap at a position; -1 in the padding.
    __device__ __forceinline__ i64 element(const i64* position, const i64* tap) const {
        i64 at = 0;
        for (int i = 0; i < RANK; i++) {
            i64 x = position[i] * strides[i] + tap[i] * dilations[i] - low[i];
            if (x < 0 || x >= input[i]) return -1;
            at = at * input[i] + x;
        }
        return at;
    }
    // The position at which an element is under a tap; -1 if there is none.
    __device__ __forceinline__ i64 position(const i64* element, const i64* tap) const {
        i64 at = 0;
        for (int i = 0; i < RANK; i++) {
            i64 x = element[i] + low[i] - tap[i] * dilations[i], p = quotient(x, strides[i]);
            if (x < 0 || p * strides[i] != x || p >= output[i]) return -1;
            at = at * output[i] + p;
        }
        return at;
    }
};
