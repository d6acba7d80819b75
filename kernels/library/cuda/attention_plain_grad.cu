// The gradient of attention without tensor cores. With p = e^(s - lse), delta = Σ dy·y of a row and
// dp = dy vᵀ:
//
//   dv = pᵀ dy,  ds = p (dp - delta),  dq = scale · ds k,  dk = scale · dsᵀ q.
//
// With dropout, dv = (f · p)ᵀ dy and dp = f · dy vᵀ with the factors f of the weights.
//
// Every sum is computed by one warp in a fixed order. The kernel for queries also sums the weights of each row whose lse
// is coarse: `factors` are the inverse sums, and 1 for other rows.

#include "attention_plain.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
attention_plain_grad_queries(T* dq, const T* dy, const T* q, const T* k, const T* v, const Sum* lse,
                             const Sum* delta, Sum* factors, const MASK_T* mask, Shape shape, Sum scale
                             DROPOUT_PARAMETERS(Sum)) {
    DYNAMIC_SHARED(shared);
#if DROPOUT != NO_DROPOUT
    Dropout<Sum> dropout(kept, drawn, keep_factor);
#endif
    Sum* q_rows = reinterpret_cast<Sum*>(shared);
    Sum* dy_rows = q_rows + BLOCK * (HEAD + 1);
    Sum* k_tile = dy_rows + BLOCK * (VALUE + 1);
    Sum* v_tile = k_tile + TILE * (HEAD + 1);
    i64 blocks = (shape.queries + BLOCK - 1) / BLOCK;
    i64 head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    i64 batch = head / shape.heads, h = head % shape.heads;
    i64 kv_head = batch * shape.groups + h / (shape.heads / shape.groups);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 row0 = head * shape.queries + first;
    load_rows<BLOCK, HEAD>(q_rows, q + row0 * HEAD, shape.queries - first);
    load_rows<BLOCK, VALUE>(dy_rows, dy + row0 * VALUE, shape.queries - first);

    Row<HEAD> sum[R] = {};
    Sum weights[R] = {};
    i64 seen = end_of_keys(first + BLOCK - 1, shape.keys);
    for (i64 key = first_key(first) / TILE * TILE; key < seen; key += TILE) {
        __syncthreads();
        load_rows<TILE, HEAD>(k_tile, k + (kv_head * shape.keys + key) * HEAD, shape.keys - key);
        load_rows<TILE, VALUE>(v_tile, v + (kv_head * shape.keys + key) * VALUE, shape.keys - key);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < R; r++) {
            int at = warp * R + r;
            Sum ds = 0;
            if (!is_hidden(shape, first + at, key + lane)) {
                Sum qk = dot<HEAD>(q_rows + at * (HEAD + 1), k_tile + lane * (HEAD + 1));
                Sum dp = dot<VALUE>(dy_rows + at * (VALUE + 1), v_tile + lane * (VALUE + 1));
                const MASK_T* added = mask + mask_place(shape, batch, h, first + at, key + lane);
                Sum p = weight(qk, lse[row0 + at], scale, added);
#if DROPOUT != NO_DROPOUT
                dp *= dropout.of((row0 + at) * shape.keys + key + lane);
#endif
                weights[r] += p;
                ds = p * (dp - delta[row0 + at]);
            }
            sum[r].add(ds, k_tile);
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        int at = warp * R + r;
        Sum total = MASK == ADDED ? warp_sum(weights[r]) : 1;
        if (first + at >= shape.queries) continue;
        Sum inverse = is_coarse(lse[row0 + at]) ? 1 / total : 1;
        if (MASK == ADDED && lane == 0) factors[row0 + at] = inverse;
        sum[r].store(dq + (row0 + at) * HEAD, is_filled(lse[row0 + at]) ? 0 : scale * inverse);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
attention_plain_grad_keys(T* dk, T* dv, const T* dy, const T* q, const T* k, const T* v, const Sum* lse,
                          const Sum* delta, const Sum* factors, const MASK_T* mask, Shape shape, Sum scale
                          DROPOUT_PARAMETERS(Sum)) {
    DYNAMIC_SHARED(shared);
#if DROPOUT != NO_DROPOUT
    Dropout<Sum> dropout(kept, drawn, keep_factor);
#endif
    Sum* k_rows = reinterpret_cast<Sum*>(shared);
    Sum* v_rows = k_rows + BLOCK * (HEAD + 1);
    Sum* q_tile = v_rows + BLOCK * (VALUE + 1);
    Sum* dy_tile = q_tile + TILE * (HEAD + 1);
    i64 blocks = (shape.keys + BLOCK - 1) / BLOCK;
    i64 kv_head = blockIdx.x / blocks, first = blockIdx.x % blocks * BLOCK;
    i64 batch = kv_head / shape.groups, shared_by = shape.heads / shape.groups;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 row0 = kv_head * shape.keys + first;
    load_rows<BLOCK, HEAD>(k_rows, k + row0 * HEAD, shape.keys - first);
    load_rows<BLOCK, VALUE>(v_rows, v + row0 * VALUE, shape.keys - first);

    Row<HEAD> dk_sum[R] = {};
    Row<VALUE> dv_sum[R] = {};
    for (i64 i = 0; i < shared_by; i++) {
        i64 h = kv_head % shape.groups * shared_by + i, head = batch * shape.heads + h;
        i64 end = end_of_queries(first + BLOCK - 1, shape.queries);
        for (i64 query = first_query(first) / TILE * TILE; query < end; query += TILE) {
            i64 row = head * shape.queries + query;
            __syncthreads();
            load_rows<TILE, HEAD>(q_tile, q + row * HEAD, shape.queries - query);
            load_rows<TILE, VALUE>(dy_tile, dy + row * VALUE, shape.queries - query);
            __syncthreads();
#pragma unroll
            for (int r = 0; r < R; r++) {
                int at = warp * R + r;
                Sum p = 0, ds = 0;
                if (!is_hidden(shape, query + lane, first + at)) {
                    Sum qk = dot<HEAD>(k_rows + at * (HEAD + 1), q_tile + lane * (HEAD + 1));
                    Sum dp = dot<VALUE>(v_rows + at * (VALUE + 1), dy_tile + lane * (VALUE + 1));
                    const MASK_T* added = mask + mask_place(shape, batch, h, query + lane, first + at);
                    p = weight(qk, lse[row + lane], scale, added);
                    if (MASK == ADDED) p *= factors[row + lane];
                    Sum f = 1;
#if DROPOUT != NO_DROPOUT
                    f = dropout.of((row + lane) * shape.keys + first + at);
#endif
                    if (!is_filled(lse[row + lane])) ds = p * (f * dp - delta[row + lane]);
                    p *= f;
                }
                dv_sum[r].add(p, dy_tile);
                dk_sum[r].add(ds, q_tile);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        int at = warp * R + r;
        if (first + at >= shape.keys) continue;
        dk_sum[r].store(dk + (row0 + at) * HEAD, scale);
        dv_sum[r].store(dv + (row0 + at) * VALUE, 1);
    }
}
