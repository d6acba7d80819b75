// Maxima and sums of windows, and their gradients, of `images` images (channels counted); one thread per result, so
// that no sum is shared.
//
// To be defined: T, the elements; RANK, the number of spatial axes.

#include "window.cuh"

typedef Number<T>::Wide Value;

// The element of each window that is its maximum: the first of equal ones; NaN is larger than any number.
__device__ __forceinline__ i64 largest(const Window& w, const T* image, const i64* position, i64 taps) {
    i64 best = -1, tap[RANK];
    Value most = 0;
    for (i64 t = 0; t < taps; t++) {
        Window::split(t, w.taps, tap);
        i64 at = w.element(position, tap);
        if (at < 0) continue;
        Value x = widen(image[at]);
        if (best < 0 || x > most || (x != x && most == most)) best = at, most = x;
    }
    return best;
}

extern "C" __global__ void max_pool(T* y, const T* x, Window w, i64 images) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    for (i64 i = global_thread(); i < images * positions; i += global_threads()) {
        i64 image = i / positions, position[RANK];
        Window::split(i - image * positions, w.output, position);
        i64 best = largest(w, x + image * size, position, taps);
        y[i] = best < 0 ? to(Value(-__uint_as_float(0x7f800000)), T()) : x[image * size + best];
    }
}

// Its index in the image, which has fewer than 2³² - 1 elements.
extern "C" __global__ void max_pool_places(u32* places, const T* x, Window w, i64 images) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    for (i64 i = global_thread(); i < images * positions; i += global_threads()) {
        i64 image = i / positions, position[RANK];
        Window::split(i - image * positions, w.output, position);
        places[i] = u32(largest(w, x + image * size, position, taps));
    }
}

// The gradient of windows with their maximum at `places` or, with `all`, of sums.
extern "C" __global__ void pool_grad(T* dx, const T* dy, const u32* places, Window w, i64 images, i64 all) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    for (i64 i = global_thread(); i < images * size; i += global_threads()) {
        i64 image = i / size, own = i - image * size, element[RANK], tap[RANK];
        Window::split(own, w.input, element);
        Value sum = 0;
        for (i64 t = taps - 1; t >= 0; t--) {
            Window::split(t, w.taps, tap);
            i64 at = w.position(element, tap);
            if (at < 0 || (!all && places[image * positions + at] != u32(own))) continue;
            sum += widen(dy[image * positions + at]);
        }
        dx[i] = to(sum, T());
    }
}

extern "C" __global__ void sum_pool(T* y, const T* x, Window w, i64 images) {
    i64 size = Window::product(w.input), positions = Window::product(w.output), taps = Window::product(w.taps);
    for (i64 i = global_thread(); i < images * positions; i += global_threads()) {
        i64 image = i / positions, position[RANK], tap[RANK];
        Window::split(i - image * positions, w.output, position);
        Value sum = 0;
        for (i64 t = 0; t < taps; t++) {
            Window::split(t, w.taps, tap);
            i64 at = w.element(position, tap);
            if (at >= 0) sum += widen(x[image * size + at]);
        }
        y[i] = to(sum, T());
    }
}
