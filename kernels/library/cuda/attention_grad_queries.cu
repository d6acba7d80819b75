// The gradient of attention for queries. With p = e^(s - lse), delta = Σ dy·y of a row and dp = dy vᵀ:
//
//   ds = p (dp - delta),  dq = scale · ds k.
//
// With dropout, dp = f · dy vᵀ with the factors f of the weights.
//
// A block processes BLOCK queries of one head and recomputes their scores with all keys (Dao 2023). WARPS, ROWS and
// TILE give the sizes of tiles.
//
// It also sums the weights of each row whose lse is coarse: `factors` are the inverse sums, and 1 for other rows.

#include "attention.cuh"

typedef Layout<Q_LAYOUT> Q;
typedef Layout<K_LAYOUT> K;
typedef Layout<V_LAYOUT> V;
typedef Layout<DY_LAYOUT> Dy;
typedef Layout<DQ_LAYOUT> Dq;
const int THREADS = WARPS * 32;
const int BLOCK = WARPS * ROWS * 16;

// dq of BLOCK queries of one head, over tiles of TILE keys; the next tile is loaded meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_grad_queries(T* dq, const T* dy, const T* q, const T* k, const T* v, const f32* lse,
                       const f32* delta, f32* factors, const MASK_T* mask, Shape shape, f32 scale
                       DROPOUT_PARAMETERS(f32)) {
    DYNAMIC_SHARED(shared);
    T* q_tile = reinterpret_cast<T*>(shared);
    T* dy_tile = q_tile + BLOCK * (D + PAD);
    T* k_tiles = dy_tile + BLOCK * (E + PAD);
    T* v_tiles = k_tiles + 2 * TILE * (D + PAD);

#if DROPOUT != NO_DROPOUT
    Dropout<f32> dropout(kept, drawn, keep_factor);
#endif
    int queries = int(shape.queries), keys = int(shape.keys), mask_key = int(shape.mask_key);
    int blocks = (queries + BLOCK - 1) / BLOCK;
    i64 head = blockIdx.x / blocks;
    int first = (blocks - 1 - int(blockIdx.x % blocks)) * BLOCK;
    i64 batch = head / shape.heads, h = head % shape.heads;
    i64 kv_head = h / (shape.heads / shape.groups);
    bool whole_q = aligned(q, 16), whole_y = aligned(dy, 16), whole_k = aligned(k, 16), whole_v = aligned(v, 16);
    q += Q::at(batch, h, first);
    dy += Dy::at(batch, h, first);
    k += K::at(batch, kv_head, 0);
    v += V::at(batch, kv_head, 0);

    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp * ROWS * 16;
    int seen = end_of_keys(first + BLOCK - 1, keys), begin = first_key(first) / TILE;
    int steps = (seen + TILE - 1) / TILE;
    i64 row0 = head * queries + first + warp_row;
    int valid = queries - first - warp_row;

    auto load = [&](int step) {
        int key = step * TILE, at = step % 2 * TILE;
        load_tile<K, TILE, HEAD, D, THREADS>(k_tiles + at * (D + PAD), k + key * K::ROW, keys - key, whole_k);
        load_tile<V, TILE, VALUE, E, THREADS>(v_tiles + at * (E + PAD), v + key * V::ROW, keys - key, whole_v);
    };

    f32 sum[ROWS][D / 8][4], row_l[ROWS][2], row_d[ROWS][2], weights[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = i * 16 + half * 8 + lane / 4;
            row_l[i][half] = row_lse(lse, row0 + row, row < valid);
            row_d[i][half] = row < valid ? delta[row0 + row] : 0;
            weights[i][half] = 0;
        }
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0;
    }

    load_tile<Q, BLOCK, HEAD, D, THREADS>(q_tile, q, queries - first, whole_q);
    load_tile<Dy, BLOCK, VALUE, E, THREADS>(dy_tile, dy, queries - first, whole_y);
    if (steps > begin) load(begin);
    copy_async_commit();

    for (int step = begin; step < steps; step++) {
        int key = step * TILE, at = step % 2 * TILE;
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        copy_async_commit();
        const T* k_tile = k_tiles + at * (D + PAD);

        f32 p[ROWS][TILE / 8][4], ds[ROWS][TILE / 8][4];
        matmul<ROWS, TILE / 8, D>(p, q_tile + warp_row * (D + PAD), k_tile);
        matmul<ROWS, TILE / 8, E>(ds, dy_tile + warp_row * (E + PAD), v_tiles + at * (E + PAD));
        int first_row = first + warp_row;
        bool edge =
            key + TILE > keys || any_hidden(first_row, first_row + ROWS * 16 - 1, key, key + TILE - 1);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first + warp_row + i * 16 + half * 8 + lane / 4;
                const MASK_T* mask_row = mask;
                if (MASK != NO_MASK && row < queries)
                    mask_row += batch * shape.mask_batch + h * shape.mask_head + row * shape.mask_query;
#pragma unroll
                for (int j = 0; j < TILE / 8; j++) {
#if DROPOUT != NO_DROPOUT
                    f32 of_pair[2] = {0, 0};
                    int even = key + j * 8 + lane % 4 * 2;
                    if (row < queries && even < keys)
                        dropout.pair((head * queries + row) * keys + even, even + 1 < keys, of_pair);
                    ds[i][j][half * 2] *= of_pair[0];
                    ds[i][j][half * 2 + 1] *= of_pair[1];
#endif
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int column = key + j * 8 + lane % 4 * 2 + e;
                        f32& x = ds[i][j][half * 2 + e];
                        if (edge && (column >= keys || is_hidden(row, column))) {
                            x = 0;
                            continue;
                        }
                        f32 w = weight(p[i][j][half * 2 + e], row_l[i][half], scale,
                                       mask_row + column * mask_key);
                        if (is_coarse(row_l[i][half])) weights[i][half] += w;
                        x = w * (x - row_d[i][half]);
                    }
                }
            }
        accumulate<ROWS, TILE / 8, D>(sum, ds, k_tile);
    }
    copy_async_wait<0>();

#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            f32 factor = 1;
#if MASK == ADDED
            f32 total = weights[i][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            if (is_coarse(row_l[i][half])) factor = 1 / total;
            int row = i * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < valid) factors[row0 + row] = factor;
#endif
            if (is_filled(row_l[i][half])) factor = 0;
#pragma unroll
            for (int j = 0; j < D / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) sum[i][j][half * 2 + e] *= scale * factor;
        }
    store_rows<Dq, ROWS, HEAD, D>(dq + Dq::at(batch, h, first + warp_row), sum, valid);
}
