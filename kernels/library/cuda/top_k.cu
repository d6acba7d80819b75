// The k first elements along the middle axis of [outer, size, inner] in sorted order, with their indices.
// NaN is larger than any number; of equal elements the one with the lower index comes first, or with the
// higher one if LAST.
//
// A block processes a line and finds one element after another: the best of those ordered behind the previous one.
//
// To be defined: T, the elements; LARGEST, LAST and VALUES (0 or 1), the last whether elements are written.

typedef Number<T>::Wide Value;

struct Item {
    Value value;
    i64 index;
};

__device__ __forceinline__ bool comes_before(const Item& a, const Item& b) {
    if (b.index < 0 || a.index < 0) return b.index < 0 && a.index >= 0;
    bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    bool larger = a_nan ? !b_nan : !b_nan && a.value > b.value;
    bool smaller = b_nan ? !a_nan : !a_nan && a.value < b.value;
    if (larger || smaller) return LARGEST ? larger : smaller;
    return LAST ? a.index > b.index : a.index < b.index;
}

extern "C" __global__ void top_k(T* values, i64* indices, const T* x, i64 outer, i64 size, i64 inner, i64 k) {
    __shared__ Item best_of_warps[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (i64 line = blockIdx.x; line < outer * inner; line += gridDim.x) {
        const T* from = x + line / inner * size * inner + line % inner;
        i64 to = line / inner * k * inner + line % inner;
        Item before = {0, -1};
        for (i64 rank = 0; rank < k; rank++) {
            Item best = {0, -1};
            for (i64 i = threadIdx.x; i < size; i += blockDim.x) {
                Item item = {widen(from[i * inner]), i};
                bool is_left = before.index < 0 || comes_before(before, item);
                if (is_left && comes_before(item, best)) best = item;
            }
            for (int mask = 16; mask > 0; mask /= 2) {
                Item other = {__shfl_xor_sync(~0u, best.value, mask), __shfl_xor_sync(~0u, best.index, mask)};
                if (comes_before(other, best)) best = other;
            }
            if (lane == 0) best_of_warps[warp] = best;
            __syncthreads();
            for (int i = 0; i < warps; i++)
                if (comes_before(best_of_warps[i], best)) best = best_of_warps[i];
            __syncthreads();
            if (threadIdx.x == 0) {
                if (VALUES) values[to + rank * inner] = from[best.index * inner];
                indices[to + rank * inner] = best.index;
            }
            before = best;
        }
    }
}
