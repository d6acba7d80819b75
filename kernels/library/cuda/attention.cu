// Attention: s = scale · q kᵀ + mask, p = softmax(s), y = p v, lse = log Σ e^s.
//
// A block processes WARPS · ROWS · 16 queries of one head and iterates over tiles of KEYS keys; the maximum m and the
// sum l of a row are carried from tile to tile, and accumulators are rescaled when m grows (Dao 2023,
// FlashAttention-2). Scores exist only in registers. The next keys are loaded while the softmax is computed, the values
// while the scores are. Dropout applies to the weights p of y alone. A row without visible keys gives y = 0 and lse = -inf.

#include "attention.cuh"

typedef Layout<Q_LAYOUT> Q;
typedef Layout<K_LAYOUT> K;
typedef Layout<V_LAYOUT> V;
typedef Layout<Y_LAYOUT> Y;
const int THREADS = WARPS * 32;
const int QUERIES = WARPS * ROWS * 16;

extern "C" __global__ void __launch_bounds__(THREADS)
attention(T* y, f32* lse, const T* q, const T* k, const T* v, const MASK_T* mask, Shape shape, f32 scale
          DROPOUT_PARAMETERS(f32)) {
    DYNAMIC_SHARED(shared);
    T* q_tile = reinterpret_cast<T*>(shared);
    T* k_tile = q_tile + QUERIES * (D + PAD);
    T* v_tile = k_tile + KEYS * (D + PAD);

#if DROPOUT != NO_DROPOUT
    Dropout<f32> dropout(kept, drawn, keep_factor);
#endif
    int queries = int(shape.queries), keys = int(shape.keys), mask_key = int(shape.mask_key);
    int tiles = (queries + QUERIES - 1) / QUERIES;
    i64 head = blockIdx.x / tiles;
    // Tiles with many visible keys first.
    int first = (tiles - 1 - int(blockIdx.x % tiles)) * QUERIES;
    i64 batch = head / shape.heads, h = head % shape.heads;
    i64 kv_head = h / (shape.heads / shape.groups);
    bool whole_q = aligned(q, 16), whole_k = aligned(k, 16), whole_v = aligned(v, 16);
    q += Q::at(batch, h, first);
    k += K::at(batch, kv_head, 0);
    v += V::at(batch, kv_head, 0);

    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp * ROWS * 16;
    int seen = end_of_keys(first + QUERIES - 1, keys), begin = first_key(first) / KEYS;
    int steps = (seen + KEYS - 1) / KEYS;

    f32 sum[ROWS][E / 8][4], m[ROWS][2], l[ROWS][2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        m[i][0] = m[i][1] = -INFINITE;
        l[i][0] = l[i][1] = 0;
#pragma unroll
        for (int j = 0; j < E / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0;
    }

    load_tile<Q, QUERIES, HEAD, D, THREADS>(q_tile, q, queries - first, whole_q);
    if (steps > begin)
        load_tile<K, KEYS, HEAD, D, THREADS>(k_tile, k + begin * KEYS * K::ROW, keys - begin * KEYS, whole_k);
    copy_async_commit();

    for (int step = begin; step < steps; step++) {
        int key = step * KEYS;
        copy_async_wait<0>();
        __syncthreads();
        load_tile<V, KEYS, VALUE, E, THREADS>(v_tile, v + key * V::ROW, keys - key, whole_v);
        copy_async_commit();

        f32 s[ROWS][KEYS / 8][4];
        matmul<ROWS, KEYS / 8, D>(s, q_tile + warp_row * (D + PAD), k_tile);

        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps)
            load_tile<K, KEYS, HEAD, D, THREADS>(k_tile, k + (key + KEYS) * K::ROW, keys - key - KEYS, whole_k);
        copy_async_commit();

        int first_row = first + warp_row;
        bool edge = key + KEYS > keys || any_hidden(first_row, first_row + ROWS * 16 - 1, key, key + KEYS - 1);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int row = first + warp_row + i * 16 + half * 8 + lane / 4;
                const MASK_T* mask_row = mask;
                if (MASK != NO_MASK && row < queries)
                    mask_row += batch * shape.mask_batch + h * shape.mask_head + row * shape.mask_query;
                f32 most = m[i][half];
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int column = key + j * 8 + lane % 4 * 2 + e;
                        f32& x = s[i][j][half * 2 + e];
                        if (edge && (column >= keys || is_hidden(row, column))) x = -INFINITE;
                        else x = score(x, scale, mask_row + column * mask_key);
                        most = fmaxf(most, x);
                    }
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
                f32 origin = most == -INFINITE ? 0 : most;
                f32 factor = power(m[i][half], origin, scale);
                m[i][half] = most;
                f32 total = l[i][half] * factor;
#pragma unroll
                for (int j = 0; j < E / 8; j++) {
                    sum[i][j][half * 2] *= factor;
                    sum[i][j][half * 2 + 1] *= factor;
                }
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        f32& x = s[i][j][half * 2 + e];
                        x = power(x, origin, scale);
                        total += x;
                    }
                l[i][half] = total;
#if DROPOUT != NO_DROPOUT
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    int column = key + j * 8 + lane % 4 * 2;
                    if (row >= queries || column >= keys) continue;
                    f32 of_pair[2];
                    dropout.pair((head * queries + row) * keys + column, column + 1 < keys, of_pair);
                    s[i][j][half * 2] *= of_pair[0];
                    s[i][j][half * 2 + 1] *= of_pair[1];
                }
#endif
            }
        }
        accumulate<ROWS, KEYS / 8, E>(sum, s, v_tile);
    }
    copy_async_wait<0>();

    i64 row0 = head * queries + first + warp_row;
    int valid = queries - first - warp_row;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            f32 total = l[i][half];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            f32 inverse = total == 0 ? 0 : 1 / total;
#pragma unroll
            for (int j = 0; j < E / 8; j++) {
                sum[i][j][half * 2] *= inverse;
                sum[i][j][half * 2 + 1] *= inverse;
            }
            int row = i * 16 + half * 8 + lane / 4;
            f32 origin = FOLDED ? m[i][half] * scale : m[i][half];
            if (lane % 4 == 0 && row < valid) lse[row0 + row] = total == 0 ? -INFINITE : origin + logf(total);
        }
    store_rows<Y, ROWS, VALUE, E>(y + Y::at(batch, h, first + warp_row), sum, valid);
}
