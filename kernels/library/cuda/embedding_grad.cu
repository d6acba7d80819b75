// The gradient of an embedding for its table: table[r] = Σ dy[i] over ids[i] = r, in the order of i; if ADDS, that
// is added to what the table holds.
//
// The positions i are sorted by row (sort.cu). A block sums the rows of RUN sorted positions: rows that begin and end
// in it are complete; the part of a row that continues from the previous block, or in the next, is stored in `parts`
// (first and last of a block) and added by the block in which the row begins. So a frequent row is summed by many
// blocks, in a fixed order.
//
// To be defined: DY and OUT, the elements; INDEX, the indices; ADDS, 0 or 1.

typedef Number<DY>::Wide Sum;
const int RUN = 64;

__device__ __forceinline__ void put(OUT& element, Sum sum) {
    if (ADDS) sum = Sum(widen(element)) + sum;
    element = to(sum, OUT());
}

// The row of every position; indices outside the table are reported and get the row `size`.
extern "C" __global__ void embedding_rows(u32* rows, const INDEX* ids, i64 count, i64 size, Fault* fault) {
    for (i64 i = global_thread(); i < count; i += global_threads()) {
        i64 row = resolve(i64(ids[i]), size, fault);
        rows[i] = u32(row < 0 ? size : row);
    }
}

extern "C" __global__ void embedding_sums(OUT* table, Sum* parts, const DY* dy, const u32* rows,
                                          const u32* positions, i64 count, i64 size, i64 width) {
    i64 begin = i64(blockIdx.x) * RUN, end = begin + RUN < count ? begin + RUN : count;
    for (i64 c = i64(blockIdx.y) * blockDim.x + threadIdx.x; c < width; c += i64(gridDim.y) * blockDim.x) {
        Sum sum = 0;
        i64 first = begin;
        for (i64 i = begin; i < end; i++) {
            sum += widen(dy[i64(positions[i]) * width + c]);
            u32 row = rows[i];
            if (i + 1 < end && rows[i + 1] == row) continue;
            bool comes = first == begin && begin > 0 && rows[begin - 1] == row;
            bool goes = i + 1 == end && end < count && rows[end] == row;
            Sum* part = parts + i64(blockIdx.x) * 2 * width + c;
            if (comes) part[0] = sum;
            else if (goes) part[width] = sum;
            else if (row < size) put(table[i64(row) * width + c], sum);
            sum = 0;
            first = i + 1;
        }
    }
}

// Adds the parts of each row that begins in one block and ends in another.
extern "C" __global__ void embedding_joins(OUT* table, const Sum* parts, const u32* rows, i64 count,
                                           i64 size, i64 width) {
    i64 end = i64(blockIdx.x + 1) * RUN;
    if (end >= count) return;
    u32 row = rows[end];
    // A row that continues from the previous block begins elsewhere.
    if (rows[end - 1] != row || row >= size || (end > RUN && rows[end - RUN - 1] == row)) return;
    for (i64 c = i64(blockIdx.y) * blockDim.x + threadIdx.x; c < width; c += i64(gridDim.y) * blockDim.x) {
        Sum sum = parts[i64(blockIdx.x) * 2 * width + width + c];
        for (i64 block = blockIdx.x + 1; block * RUN < count && rows[block * RUN] == row; block++)
            sum += parts[block * 2 * width + c];
        put(table[i64(row) * width + c], sum);
    }
}
