// Strided copies: to[place_to(i)] = from[place_from(i)] for the elements i of a grid.
//
// T is the type of one access: an element E, or several that are contiguous on both sides. Where an address is not
// aligned to T, the elements are moved one by one.

extern "C" __global__ void copy_strided(T* to, const T* from, Axes to_axes, Axes from_axes, i64 n) {
    bool whole = aligned(to, sizeof(T)) && aligned(from, sizeof(T));
    for (i64 i = global_thread(); i < n; i += global_threads())
        move<E>(to + to_axes.place(i, n), from + from_axes.place(i, n), whole);
}

// Transposes: the axis `c` is contiguous in `from`, the axis `r` in `to`; tiles of both go through shared memory, the
// other axes are counted by `rest`. Padding by one column keeps columns in different banks.
const int TILE = 32;

extern "C" __global__ void copy_transposed(T* to, const T* from, Axes to_rest, Axes from_rest,
                                           i64 rows, i64 columns, i64 to_stride, i64 from_stride,
                                           i64 batches) {
    __shared__ T tile[TILE][TILE + 1];
    int x = threadIdx.x % TILE, y = threadIdx.x / TILE, step = blockDim.x / TILE;
    i64 tiles_r = (rows + TILE - 1) / TILE, tiles_c = (columns + TILE - 1) / TILE;
    i64 n = batches * tiles_r * tiles_c;
    for (i64 i = blockIdx.x; i < n; i += gridDim.x) {
        i64 batch = i / (tiles_r * tiles_c), r0 = i / tiles_c % tiles_r * TILE, c0 = i % tiles_c * TILE;
        const T* source = from + from_rest.place(batch, batches);
        T* target = to + to_rest.place(batch, batches);
        for (int j = y; j < TILE; j += step)
            if (r0 + j < rows && c0 + x < columns) tile[j][x] = source[(r0 + j) * from_stride + c0 + x];
        __syncthreads();
        for (int j = y; j < TILE; j += step)
            if (c0 + j < columns && r0 + x < rows) target[(c0 + j) * to_stride + r0 + x] = tile[x][j];
        __syncthreads();
    }
}
