// Maxima and sums of windows, and their gradients, of `images` images (channels counted). A thread computes one maximum
// or sum, or the gradients of WIDTH neighbors, so that no sum is shared.
//
// To be defined: T, the elements; RANK, the number of spatial axes; WINDOW, the numbers of a `Window`; INDEX (i32 or
// i64), which counts the elements of all images and the threads; PLACE, which counts taps; WIDTH, a divisor of the size
// of the last axis.

#include "window.cuh"

typedef Number<T>::Wide Value;

// Known when it is compiled, so that loops over taps are unrolled to loads at constant offsets.
__device__ constexpr Window W = {WINDOW};
const int LAST = RANK - 1;

__device__ constexpr INDEX product(const i64 (&sizes)[RANK]) {
    INDEX n = 1;
    for (int axis = 0; axis < RANK; axis++) n *= INDEX(sizes[axis]);
    return n;
}
const INDEX SIZE = product(W.input), POSITIONS = product(W.output), TAPS = product(W.taps);

// So many iterations are unrolled at most.
const int MOST_UNROLLED = 64;
__device__ constexpr int unrolled(INDEX n) { return n <= MOST_UNROLLED ? int(n) : 8; }

// Neither is negative. Unsigned division takes fewer instructions.
__device__ __forceinline__ INDEX quotient(INDEX x, INDEX by) {
    return sizeof(INDEX) == 4 ? INDEX(u32(x) / u32(by)) : INDEX(u64(x) / u64(by));
}

__device__ __forceinline__ bool is_within(INDEX x, i64 size) { return x >= 0 && x < INDEX(size); }

__device__ __forceinline__ T lowest() { return to(Value(-__uint_as_float(0x7f800000)), T()); }

// Window i of all images.
struct Place {
    // Where its first tap is: on each axis, and in memory. It may be in the padding.
    INDEX at[RANK];
    i64 first;

    __device__ __forceinline__ explicit Place(INDEX i) : first(0) {
        INDEX step = 1;
#pragma unroll
        for (int axis = LAST; axis >= 0; axis--) {
            INDEX size = INDEX(W.output[axis]), next = quotient(i, size);
            at[axis] = (i - next * size) * INDEX(W.strides[axis]) - INDEX(W.low[axis]);
            first += i64(at[axis] * step);
            step *= INDEX(W.input[axis]);
            i = next;
        }
        first += i64(i * SIZE);
    }

    // The first tap that is not in the padding.
    __device__ __forceinline__ INDEX first_tap() const {
        INDEX tap = 0;
#pragma unroll
        for (int axis = 0; axis < RANK; axis++) {
            INDEX apart = INDEX(W.dilations[axis]), own = at[axis] < 0 ? quotient(apart - 1 - at[axis], apart) : 0;
            tap = tap * INDEX(W.taps[axis]) + own;
        }
        return tap;
    }

    // Calls `each(tap, element)` for all taps in order; the padding is filled with `border`.
    template <class Each> __device__ __forceinline__ void each(const T* x, T border, Each each) const {
#pragma unroll unrolled(TAPS)
        for (INDEX tap = 0; tap < TAPS; tap++) {
            INDEX rest = tap, step = 1, offset = 0;
            bool exists = true;
#pragma unroll
            for (int axis = LAST; axis >= 0; axis--) {
                INDEX next = quotient(rest, INDEX(W.taps[axis]));
                INDEX own = (rest - next * INDEX(W.taps[axis])) * INDEX(W.dilations[axis]);
                exists = exists && is_within(at[axis] + own, W.input[axis]);
                offset += own * step;
                step *= INDEX(W.input[axis]);
                rest = next;
            }
            T element = border;
            if (exists) element = x[first + i64(offset)];
            each(tap, element);
        }
    }
};

// The maximum of a window: the first of equal ones; NaN is larger than any number.
struct Most {
    Value value;
    T element;
    INDEX tap;

    __device__ __forceinline__ Most(const T* x, Place place) : element(lowest()), tap(place.first_tap()) {
        value = widen(element);
        // No element of the padding, nor any other -inf, exceeds what it starts with.
        place.each(x, element, [&](INDEX at, T other) {
            Value v = widen(other);
            if (!(v <= value) && value == value) value = v, element = other, tap = at;
        });
    }
};

extern "C" __global__ void max_pool(T* y, const T* x, i64 images) {
    INDEX n = INDEX(images) * POSITIONS;
    for (INDEX i = INDEX(global_thread()); i < n; i += INDEX(global_threads())) y[i] = Most(x, Place(i)).element;
}

// The tap that is on it.
extern "C" __global__ void max_pool_places(PLACE* places, const T* x, i64 images) {
    INDEX n = INDEX(images) * POSITIONS;
    for (INDEX i = INDEX(global_thread()); i < n; i += INDEX(global_threads())) places[i] = PLACE(Most(x, Place(i)).tap);
}

extern "C" __global__ void sum_pool(T* y, const T* x, i64 images) {
    INDEX n = INDEX(images) * POSITIONS;
    for (INDEX i = INDEX(global_thread()); i < n; i += INDEX(global_threads())) {
        Value sum = 0;
        Place(i).each(x, to(Value(0), T()), [&](INDEX, T element) { sum += widen(element); });
        y[i] = to(sum, T());
    }
}

// Elements of an axis that a thread computes.
__device__ constexpr INDEX width(int axis) { return axis == LAST ? WIDTH : 1; }

// So many neighboring windows can have one of these elements.
__device__ constexpr INDEX near(int axis) {
    INDEX extent = INDEX((W.taps[axis] - 1) * W.dilations[axis]) + width(axis), stride = INDEX(W.strides[axis]);
    return (extent + stride - 1) / stride;
}
__device__ constexpr bool all_are_near(int axis) { return near(axis) > INDEX(W.output[axis]); }
__device__ constexpr INDEX visited(int axis) { return all_are_near(axis) ? INDEX(W.output[axis]) : near(axis); }

__device__ constexpr INDEX visited_rows() {
    INDEX n = 1;
    for (int axis = 0; axis < LAST; axis++) n *= visited(axis);
    return n;
}

// The tap of an axis at a distance from the first; -1 if there is none.
__device__ __forceinline__ INDEX tap_at(int axis, INDEX distance) {
    INDEX apart = INDEX(W.dilations[axis]), tap = quotient(distance, apart);
    return is_within(distance, W.taps[axis] * apart) && tap * apart == distance ? tap : -1;
}

// The gradient of sums or, with `OF_MAXIMA`, of windows whose maximum is under the tap at `places`: added in the order
// of windows.
template <bool OF_MAXIMA>
__device__ __forceinline__ void gradient(T* dx, const T* dy, const PLACE* places, INDEX images) {
    typedef Pack<T, WIDTH> Many;
    bool whole = aligned(dx, sizeof(Many));
    INDEX n = images * (SIZE / WIDTH);
    for (INDEX i = INDEX(global_thread()); i < n; i += INDEX(global_threads())) {
        // Of each axis the last window that is near, and the distance of the last element from its first tap.
        INDEX last[RANK], distance[RANK], image = i;
#pragma unroll
        for (int axis = LAST; axis >= 0; axis--) {
            INDEX size = INDEX(W.input[axis]) / width(axis), next = quotient(image, size);
            INDEX stride = INDEX(W.strides[axis]), end = INDEX(W.low[axis]) + width(axis) - 1;
            INDEX element = (image - next * size) * width(axis) + end;
            last[axis] = all_are_near(axis) ? INDEX(W.output[axis]) - 1 : quotient(element, stride);
            distance[axis] = element - last[axis] * stride;
            // Then it is known when it is compiled.
            if (!all_are_near(axis) && width(axis) % stride == 0) distance[axis] = end % stride;
            image = next;
        }
        Value sum[WIDTH] = {};
#pragma unroll visited_rows() * visited(LAST) <= MOST_UNROLLED ? int(visited_rows()) : 1
        for (INDEX row = visited_rows() - 1; row >= 0; row--) {
            INDEX rest = row, position = 0, step = INDEX(W.output[LAST]), tap = 0, taps = INDEX(W.taps[LAST]);
            bool is_near = true;
#pragma unroll
            for (int axis = LAST - 1; axis >= 0; axis--) {
                INDEX next = quotient(rest, visited(axis)), before = rest - next * visited(axis);
                INDEX own = tap_at(axis, distance[axis] + before * INDEX(W.strides[axis])), p = last[axis] - before;
                is_near = is_near && own >= 0 && is_within(p, W.output[axis]);
                position += p * step;
                step *= INDEX(W.output[axis]);
                tap += own * taps;
                taps *= INDEX(W.taps[axis]);
                rest = next;
            }
            if (!is_near) continue;
            i64 from = i64(image * POSITIONS + position + last[LAST]);
#pragma unroll unrolled(visited(LAST))
            for (INDEX before = visited(LAST) - 1; before >= 0; before--) {
                bool exists = is_within(last[LAST] - before, W.output[LAST]);
                INDEX place = OF_MAXIMA && exists ? INDEX(places[from - before]) - tap : -1;
                Value d = exists ? widen(dy[from - before]) : Value(0);
#pragma unroll
                for (int j = 0; j < WIDTH; j++) {
                    INDEX from_end = before * INDEX(W.strides[LAST]) - (WIDTH - 1 - j);
                    INDEX own = tap_at(LAST, distance[LAST] + from_end);
                    if (own >= 0 && (OF_MAXIMA ? place == own : exists)) sum[j] += d;
                }
            }
        }
        Many all;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) all.at[j] = to(sum[j], T());
        move<T>(reinterpret_cast<Many*>(dx) + i, &all, whole);
    }
}

extern "C" __global__ void max_pool_grad(T* dx, const T* dy, const PLACE* places, i64 images) {
    gradient<true>(dx, dy, places, INDEX(images));
}

extern "C" __global__ void sum_pool_grad(T* dx, const T* dy, i64 images) {
    gradient<false>(dx, dy, nullptr, INDEX(images));
}
