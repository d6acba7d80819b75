// out[i] = data[block(i)] for the positions i of a grid, blocks of `block` elements; block(i) is the base of the
// position plus Σ index · stride over the axes of its index tuple. An index outside its axis is reported and gives
// zeros.
//
// To be defined: T, the type of one access, and E, its elements; INDEX, the indices.

extern "C" __global__ void gather(T* out, const T* data, const INDEX* ids, Axes tuples, Axes bases, Axes axes,
                                  i64 places, i64 block, Fault* fault) {
    bool whole = aligned(out, sizeof(T)) && aligned(data, sizeof(T));
    for (i64 i = global_thread(); i < places * block; i += global_threads()) {
        i64 place = i / block, at = bases.place(place, places);
        const INDEX* tuple = ids + tuples.place(place, places);
        bool exists = true;
        for (int d = 0; d < int(axes.count); d++) {
            i64 index = resolve(i64(tuple[d]), axes.sizes[d], fault);
            exists = exists && index >= 0;
            at += index * axes.strides[d];
        }
        const T* from = data + at * block + (i - place * block);
        if (exists) {
            move<E>(out + i, from, whole);
        } else {
            for (int j = 0; j < int(sizeof(T) / sizeof(E)); j++) reinterpret_cast<E*>(out + i)[j] = E{};
        }
    }
}
