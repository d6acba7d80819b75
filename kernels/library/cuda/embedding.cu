// out[i] = table[ids[i]], rows of `width` elements, rounded to OUT. An index outside the table is reported and gives
// zeros.
//
// To be defined: TABLE and OUT, the elements; INDEX, the indices.

const int VECTOR = 16 / (sizeof(TABLE) > sizeof(OUT) ? sizeof(TABLE) : sizeof(OUT));

template <int N>
__device__ __forceinline__ void rows(OUT* out, const TABLE* table, const INDEX* ids, i64 count, i64 size,
                                     i64 width, Fault* fault) {
    i64 per_row = width / N, n = count * per_row;
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        i64 at = i / per_row, part = i - at * per_row;
        i64 row = resolve(i64(ids[at]), size, fault);
        Pack<OUT, N> result;
        Pack<TABLE, N> from = {};
        if (row >= 0) from = reinterpret_cast<const Pack<TABLE, N>*>(table + row * width)[part];
        for (int j = 0; j < N; j++) result.at[j] = to(widen(from.at[j]), OUT());
        reinterpret_cast<Pack<OUT, N>*>(out + at * width)[part] = result;
    }
}

extern "C" __global__ void embedding(OUT* out, const TABLE* table, const INDEX* ids, i64 count, i64 size,
                                     i64 width, Fault* fault) {
    if (width % VECTOR == 0 && aligned(table, 16) && aligned(out, 16))
        rows<VECTOR>(out, table, ids, count, size, width, fault);
    else
        rows<1>(out, table, ids, count, size, width, fault);
}
