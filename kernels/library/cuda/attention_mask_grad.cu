// The gradient of a mask that was added to the scores: dmask = Σ p (dp - delta) over the axes along which
// the mask was broadcast, with p = e^(s - lse), dp = dy vᵀ, times the factors of dropout, and delta = Σ dy·y of a row.
//
// A block processes BLOCK queries and TILE keys of one mask, or all of an axis along which the mask has one element,
// and iterates over the batches and heads that share it in a fixed order.

#include "attention_plain.cuh"

// Strides of the gradient, which is dense; the mask is broadcast where a stride is 0.
struct Dense {
    i64 batch, head, query, key;
};

extern "C" __global__ void __launch_bounds__(THREADS)
attention_mask_grad(Sum* dmask, const T* dy, const T* q, const T* k, const T* v, const Sum* lse,
                    const Sum* delta, const Sum* factors, const MASK_T* mask, Shape shape, Sum scale, Dense dense, i64 batches
                    DROPOUT_PARAMETERS(Sum)) {
    DYNAMIC_SHARED(shared);
#if DROPOUT != NO_DROPOUT
    Dropout<Sum> dropout(kept, drawn, keep_factor);
#endif
    Sum* q_rows = reinterpret_cast<Sum*>(shared);
    Sum* dy_rows = q_rows + BLOCK * (HEAD + 1);
    Sum* k_tile = dy_rows + BLOCK * (VALUE + 1);
    Sum* v_tile = k_tile + TILE * (HEAD + 1);
    Sum* sums = v_tile + TILE * (VALUE + 1);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 q_blocks = dense.query ? (shape.queries + BLOCK - 1) / BLOCK : 1;
    i64 k_blocks = dense.key ? (shape.keys + TILE - 1) / TILE : 1;
    i64 heads = dense.head ? shape.heads : 1;
    i64 index = blockIdx.x;
    i64 key0 = index % k_blocks * TILE, query0 = index / k_blocks % q_blocks * BLOCK;
    i64 head0 = index / (k_blocks * q_blocks) % heads, batch0 = index / (k_blocks * q_blocks * heads);
    i64 batch1 = dense.batch ? batch0 + 1 : batches, head1 = dense.head ? head0 + 1 : shape.heads;
    i64 query1 = dense.query ? query0 + 1 : shape.queries, key1 = dense.key ? key0 + 1 : shape.keys;

    Sum sum[R] = {};
    for (i64 batch = batch0; batch < batch1; batch++)
        for (i64 h = head0; h < head1; h++)
            for (i64 query = query0; query < query1; query += BLOCK)
                for (i64 key = key0; key < key1; key += TILE) {
                    if (key >= end_of_keys(query + BLOCK - 1, shape.keys)) break;
                    if (key + TILE <= first_key(query)) continue;
                    i64 row = (batch * shape.heads + h) * shape.queries + query;
                    i64 kv_head = batch * shape.groups + h / (shape.heads / shape.groups);
                    i64 kv_row = kv_head * shape.keys + key;
                    __syncthreads();
                    load_rows<BLOCK, HEAD>(q_rows, q + row * HEAD, shape.queries - query);
                    load_rows<BLOCK, VALUE>(dy_rows, dy + row * VALUE, shape.queries - query);
                    load_rows<TILE, HEAD>(k_tile, k + kv_row * HEAD, shape.keys - key);
                    load_rows<TILE, VALUE>(v_tile, v + kv_row * VALUE, shape.keys - key);
                    __syncthreads();
#pragma unroll
                    for (int r = 0; r < R; r++) {
                        int at = warp * R + r;
                        if (is_hidden(shape, query + at, key + lane)) continue;
                        Sum qk = dot<HEAD>(q_rows + at * (HEAD + 1), k_tile + lane * (HEAD + 1));
                        Sum dp = dot<VALUE>(dy_rows + at * (VALUE + 1), v_tile + lane * (VALUE + 1));
                        const MASK_T* added = mask + mask_place(shape, batch, h, query + at, key + lane);
                        Sum p = weight(qk, lse[row + at], scale, added) * factors[row + at];
#if DROPOUT != NO_DROPOUT
                        dp *= dropout.of((row + at) * shape.keys + key + lane);
#endif
                        if (!is_filled(lse[row + at])) sum[r] += p * (dp - delta[row + at]);
                    }
                }

    // Sum over lanes for a broadcast key, over rows for a broadcast query.
    dmask += batch0 * dense.batch + head0 * dense.head;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (!dense.key) sum[r] = warp_sum(sum[r]);
        sums[(warp * R + r) * TILE + lane] = sum[r];
    }
    __syncthreads();
    int width = dense.key ? TILE : 1;
    for (int i = threadIdx.x; i < (dense.query ? BLOCK : 1) * width; i += THREADS) {
        int at = i / width, column = i % width;
        i64 query = dense.query ? query0 + at : 0, key = dense.key ? key0 + column : 0;
        if ((dense.query && query >= shape.queries) || (dense.key && key >= shape.keys)) continue;
        Sum total = 0;
        for (int row = dense.query ? at : 0; row < (dense.query ? at + 1 : BLOCK); row++)
            total += sums[row * TILE + column];
        dmask[query * dense.query + key * dense.key] = total;
    }
}
