// data[block(i)] = f(data[block(i)], updates[i]) in ascending order of i; positions as in gather.cu.
//
// Positions are sorted by the block that they write (sort.cu); a thread applies all updates of one element of one
// block, and rounds once.
//
// To be defined: T, the elements; INDEX, the indices; F (REPLACE, ADD, MUL, MAX or MIN).

#define REPLACE 0
#define ADD 1
#define MUL 2
#define MAX 3
#define MIN 4

typedef Number<T>::Wide Value;

// The block of every position; `blocks`, which is not a block, where an index is outside its axis.
extern "C" __global__ void scatter_keys(u32* keys, const INDEX* ids, Axes tuples, Axes bases, Axes axes,
                                        i64 places, i64 blocks, Fault* fault) {
    for (i64 i = global_thread(); i < places; i += global_threads()) {
        i64 at = bases.place(i, places);
        const INDEX* tuple = ids + tuples.place(i, places);
        bool exists = true;
        for (int d = 0; d < int(axes.count); d++) {
            i64 index = resolve(i64(tuple[d]), axes.sizes[d], fault);
            exists = exists && index >= 0;
            at += index * axes.strides[d];
        }
        keys[i] = u32(exists ? at : blocks);
    }
}

__device__ __forceinline__ Value combine(Value old, Value x) {
#if F == ADD
    return old + x;
#elif F == MUL
    return old * x;
#elif F == MAX
    return x > old || x != x ? x : old;
#elif F == MIN
    return x < old || x != x ? x : old;
#else
    return x;
#endif
}

extern "C" __global__ void scatter_apply(T* data, const T* updates, const u32* keys, const u32* places,
                                         i64 count, i64 blocks, i64 block) {
    for (i64 i = global_thread(); i < count * block; i += global_threads()) {
        i64 first = i / block, element = i - first * block;
        u32 key = keys[first];
        if (key >= blocks || (first > 0 && keys[first - 1] == key)) continue;
        T* at = data + i64(key) * block + element;
        i64 end = first + 1;
        while (end < count && keys[end] == key) end++;
#if F == REPLACE
        *at = updates[i64(places[end - 1]) * block + element];
#else
        Value value = widen(*at);
        for (i64 j = first; j < end; j++) value = combine(value, widen(updates[i64(places[j]) * block + element]));
        *at = to(value, T());
#endif
    }
}
