// Fills an array with one element, given by its bits.

extern "C" __global__ void fill(T* to, i64 bits, i64 n) {
    T element;
    memcpy(&element, &bits, sizeof(T));
    for (i64 i = global_thread(); i < n; i += global_threads()) to[i] = element;
}
