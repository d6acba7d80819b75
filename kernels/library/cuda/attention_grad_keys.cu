// The gradient of attention for keys and values. With p = e^(s - lse), delta = Σ dy·y of a row and
// dp = dy vᵀ:
//
//   dv = pᵀ dy,  ds = p (dp - delta),  dk = scale · dsᵀ q.
//
// With dropout, dv = (f · p)ᵀ dy and dp = f · dy vᵀ with the factors f of the weights; the sign of p then says whether f is 0.
//
// A block processes BLOCK keys of one key head, recomputes their scores with all queries and sums over the queries, and
// over the query heads that share the key head, in a fixed order (Dao 2023). It computes the transposed scores, which
// are then directly an operand of the next MMA.
//
// WANT_K and WANT_V select dk and dv: both together need many registers, and dv alone needs no values in shared memory.
// WARPS, ROWS and TILE give the sizes of tiles.

#include "attention.cuh"

typedef Layout<Q_LAYOUT> Q;
typedef Layout<K_LAYOUT> K;
typedef Layout<V_LAYOUT> V;
typedef Layout<DY_LAYOUT> Dy;
typedef Layout<DK_LAYOUT> Dk;
typedef Layout<DV_LAYOUT> Dv;
const int THREADS = WARPS * 32;
const int BLOCK = WARPS * ROWS * 16;

// dk and dv of BLOCK keys of one key head, over tiles of TILE queries; the next tile is loaded meanwhile.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_grad_keys(T* dk, T* dv, const T* dy, const T* q, const T* k, const T* v, const f32* lse,
                    const f32* delta, const f32* factors, const MASK_T* mask, Shape shape, f32 scale
                    DROPOUT_PARAMETERS(f32)) {
    DYNAMIC_SHARED(shared);
    T* k_tile = reinterpret_cast<T*>(shared);
    T* v_tile = k_tile + BLOCK * (D + PAD);
    T* q_tiles = v_tile + (WANT_K ? BLOCK * (E + PAD) : 0);
    T* dy_tiles = q_tiles + 2 * TILE * (D + PAD);
    // The lse and the factor of weights of a query, and its delta, in the padding of its rows.
    auto lse_of = [&](int row) { return reinterpret_cast<f32*>(q_tiles + row * (D + PAD) + D); };
    auto factor_of = [&](int row) { return lse_of(row) + 1; };
    auto delta_of = [&](int row) { return reinterpret_cast<f32*>(dy_tiles + row * (E + PAD) + E); };

#if DROPOUT != NO_DROPOUT
    Dropout<f32> dropout(kept, drawn, keep_factor);
#endif
    int queries = int(shape.queries), keys = int(shape.keys);
    int mask_query = int(shape.mask_query), mask_key = int(shape.mask_key);
    int blocks = (keys + BLOCK - 1) / BLOCK;
    i64 kv_head = blockIdx.x / blocks;
    int first = int(blockIdx.x % blocks) * BLOCK;
    i64 batch = kv_head / shape.groups, group = kv_head % shape.groups;
    int shared_by = int(shape.heads / shape.groups);
    // The first of the query heads that read these keys.
    i64 h0 = group * shared_by;
    bool whole_k = aligned(k, 16), whole_v = aligned(v, 16), whole_q = aligned(q, 16), whole_y = aligned(dy, 16);
    k += K::at(batch, group, first);
    v += V::at(batch, group, first);

    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int warp_row = warp * ROWS * 16;
    int skipped = first_query(first) / TILE;
    int per_head = (end_of_queries(first + BLOCK - 1, queries) + TILE - 1) / TILE - skipped;
    int steps = per_head > 0 ? per_head * shared_by : 0;

    auto load = [&](int step) {
        i64 h = h0 + step / per_head;
        int query = (step % per_head + skipped) * TILE, at = step % 2 * TILE;
        i64 row = (batch * shape.heads + h) * queries + query;
        load_tile<Q, TILE, HEAD, D, THREADS>(q_tiles + at * (D + PAD), q + Q::at(batch, h, query), queries - query,
                                             whole_q);
        load_tile<Dy, TILE, VALUE, E, THREADS>(dy_tiles + at * (E + PAD), dy + Dy::at(batch, h, query),
                                               queries - query, whole_y);
        for (int i = threadIdx.x; i < TILE; i += THREADS) {
            bool exists = query + i < queries;
            *lse_of(at + i) = row_lse(lse, row + i, exists);
            if (MASK == ADDED) *factor_of(at + i) = exists ? factors[row + i] : 1;
            *delta_of(at + i) = exists ? delta[row + i] : 0;
        }
    };

#if WANT_K
    f32 dk_sum[ROWS][D / 8][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk_sum[i][j][e] = 0;
#endif
#if WANT_V
    f32 dv_sum[ROWS][E / 8][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < E / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dv_sum[i][j][e] = 0;
#endif

    load_tile<K, BLOCK, HEAD, D, THREADS>(k_tile, k, keys - first, whole_k);
    if (WANT_K) load_tile<V, BLOCK, VALUE, E, THREADS>(v_tile, v, keys - first, whole_v);
    if (steps > 0) load(0);
    copy_async_commit();

    for (int step = 0; step < steps; step++) {
        copy_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        copy_async_commit();

        int at = step % 2 * TILE, query = (step % per_head + skipped) * TILE;
        const T* q_tile = q_tiles + at * (D + PAD);
        const T* dy_tile = dy_tiles + at * (E + PAD);
        i64 h = h0 + step / per_head;
        const MASK_T* mask_head = mask;
        if (MASK != NO_MASK) mask_head += batch * shape.mask_batch + h * shape.mask_head;

        // Rows are keys here, columns queries.
        f32 p[ROWS][TILE / 8][4];
        matmul<ROWS, TILE / 8, D>(p, k_tile + warp_row * (D + PAD), q_tile);
        int first_row = first + warp_row;
        bool edge = any_hidden(query, query + TILE - 1, first_row, first_row + ROWS * 16 - 1);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int key = first + warp_row + i * 16 + e / 2 * 8 + lane / 4;
                    int column = j * 8 + lane % 4 * 2 + e % 2;
                    int place = 0;
                    bool hidden = edge && is_hidden(query + column, key);
                    if (MASK != NO_MASK) {
                        hidden = hidden || key >= keys || query + column >= queries;
                        if (!hidden) place = (query + column) * mask_query + key * mask_key;
                    }
                    f32 w = weight(p[i][j][e], *lse_of(at + column), scale, mask_head + place);
                    if (MASK == ADDED) w *= *factor_of(at + column);
                    p[i][j][e] = hidden ? 0 : w;
#if DROPOUT != NO_DROPOUT
                    bool exists = key < keys && query + column < queries;
                    i64 row = (batch * shape.heads + h) * queries + query + column;
                    if (exists && dropout.of(row * keys + key) == 0) p[i][j][e] = -p[i][j][e];
#endif
                }
#if WANT_V && DROPOUT != NO_DROPOUT
        f32 kept_p[ROWS][TILE / 8][4];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) kept_p[i][j][e] = p[i][j][e] < 0 ? 0 : p[i][j][e] * keep_factor;
        accumulate<ROWS, TILE / 8, E>(dv_sum, kept_p, dy_tile);
#elif WANT_V
        accumulate<ROWS, TILE / 8, E>(dv_sum, p, dy_tile);
#endif
#if WANT_K
        f32 ds[ROWS][TILE / 8][4];
        matmul<ROWS, TILE / 8, E>(ds, v_tile + warp_row * (E + PAD), dy_tile);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int row = at + j * 8 + lane % 4 * 2 + e % 2;
                    f32& x = ds[i][j][e];
#if DROPOUT != NO_DROPOUT
                    x = p[i][j][e] < 0 ? 0 : x * keep_factor;
                    p[i][j][e] = fabsf(p[i][j][e]);
#endif
                    x = is_filled(*lse_of(row)) ? 0 : p[i][j][e] * (x - *delta_of(row));
                }
        accumulate<ROWS, TILE / 8, D>(dk_sum, ds, q_tile);
#endif
    }
    copy_async_wait<0>();

    int valid = keys - first - warp_row;
#if WANT_K
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) dk_sum[i][j][e] *= scale;
    store_rows<Dk, ROWS, HEAD, D>(dk + Dk::at(batch, group, first + warp_row), dk_sum, valid);
#endif
#if WANT_V
    store_rows<Dv, ROWS, VALUE, E>(dv + Dv::at(batch, group, first + warp_row), dv_sum, valid);
#endif
}
