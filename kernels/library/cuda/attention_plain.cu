// Attention without tensor cores: s = scale · q kᵀ + mask, p = softmax(s), y = p v, lse = log Σ e^s, with a running
// maximum and sum (Dao 2022). A row without visible keys gives y = 0 and lse = -inf.

#include "attention_plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_plain(T* y, Sum* lse, const T* q, const T* k, const T* v, const MASK_T* mask, Shape shape, Sum scale
                DROPOUT_PARAMETERS(Sum)) {
    DYNAMIC_SHARED(shared);
#if DROPOUT != NO_DROPOUT
    Dropout<Sum> dropout(kept, drawn, keep_factor);
#endif
    Sum* q_rows = reinterpret_cast<Sum*>(shared);
    Sum* k_tile = q_rows + BLOCK * (HEAD + 1);
    Sum* v_tile = k_tile + TILE * (HEAD + 1);
    i64 blocks = (shape.queries + BLOCK - 1) / BLOCK;
    i64 head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    i64 batch = head / shape.heads, h = head % shape.heads;
    i64 kv_head = batch * shape.groups + h / (shape.heads / shape.groups);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    load_rows<BLOCK, HEAD>(q_rows, q + (head * shape.queries + first) * HEAD, shape.queries - first);

    Row<VALUE> sum[R] = {};
    Sum m[R], l[R];
#pragma unroll
    for (int r = 0; r < R; r++) m[r] = -infinite(), l[r] = 0;
    i64 seen = end_of_keys(first + BLOCK - 1, shape.keys);
    for (i64 key = first_key(first) / TILE * TILE; key < seen; key += TILE) {
        __syncthreads();
        load_rows<TILE, HEAD>(k_tile, k + (kv_head * shape.keys + key) * HEAD, shape.keys - key);
        load_rows<TILE, VALUE>(v_tile, v + (kv_head * shape.keys + key) * VALUE, shape.keys - key);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < R; r++) {
            i64 query = first + warp * R + r;
            Sum s = -infinite();
            if (!is_hidden(shape, query, key + lane)) {
                Sum qk = dot<HEAD>(q_rows + (warp * R + r) * (HEAD + 1), k_tile + lane * (HEAD + 1));
                s = score(qk, scale, mask + mask_place(shape, batch, h, query, key + lane));
            }
            Sum most = warp_most(s);
            most = m[r] > most ? m[r] : most;
            Sum origin = most == -infinite() ? Sum(0) : most;
            Sum change = exponential(m[r] - origin), p = exponential(s - origin);
            m[r] = most;
            l[r] = l[r] * change + warp_sum(p);
#if DROPOUT != NO_DROPOUT
            if (query < shape.queries && key + lane < shape.keys)
                p *= dropout.of((head * shape.queries + query) * shape.keys + key + lane);
#endif
            sum[r].scale(change);
            sum[r].add(p, v_tile);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        i64 query = first + warp * R + r, row = head * shape.queries + query;
        if (query >= shape.queries) continue;
        sum[r].store(y + row * VALUE, l[r] == 0 ? Sum(0) : 1 / l[r]);
        if (lane == 0) lse[row] = l[r] == 0 ? -infinite() : m[r] + logarithm(l[r]);
    }
}
