// A stable radix sort of numbers below 2^31 with their original positions, eight bits at a time.
//
// A pass counts the digits of each chunk of 1024 numbers, computes prefix sums over digits and chunks, and moves every
// number behind those with a smaller digit and earlier ones with the same digit.

const int CHUNK = 1024;
const int DIGITS = 256;
const int WARPS = CHUNK / 32;

// counts[digit][chunk], one block per chunk.
extern "C" __global__ void __launch_bounds__(CHUNK)
sort_count(u32* counts, const u32* keys, i64 n, i64 chunks, i64 shift) {
    __shared__ u32 count[DIGITS];
    if (threadIdx.x < DIGITS) count[threadIdx.x] = 0;
    __syncthreads();
    i64 i = i64(blockIdx.x) * CHUNK + threadIdx.x;
    if (i < n) atomicAdd(&count[keys[i] >> shift & (DIGITS - 1)], 1u);
    __syncthreads();
    if (threadIdx.x < DIGITS) counts[threadIdx.x * chunks + blockIdx.x] = count[threadIdx.x];
}

// Exclusive prefix sum of n numbers; one block.
extern "C" __global__ void __launch_bounds__(CHUNK) sort_scan(u32* counts, i64 n) {
    __shared__ u32 sums[WARPS];
    i64 each = (n + CHUNK - 1) / CHUNK, begin = threadIdx.x * each;
    i64 end = begin + each < n ? begin + each : n;
    u32 own = 0;
    for (i64 i = begin; i < end; i++) own += counts[i];
    u32 up_to = own;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int d = 1; d < 32; d *= 2) {
        u32 other = __shfl_up_sync(~0u, up_to, d);
        if (lane >= d) up_to += other;
    }
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    if (warp == 0) {
        u32 total = sums[lane];
        for (int d = 1; d < 32; d *= 2) {
            u32 other = __shfl_up_sync(~0u, total, d);
            if (lane >= d) total += other;
        }
        sums[lane] = total;
    }
    __syncthreads();
    u32 before = up_to - own + (warp > 0 ? sums[warp - 1] : 0);
    for (i64 i = begin; i < end; i++) {
        u32 x = counts[i];
        counts[i] = before;
        before += x;
    }
}

// Moves numbers and positions; in the first pass a number's position is its index.
extern "C" __global__ void __launch_bounds__(CHUNK)
sort_move(u32* keys_to, u32* places_to, const u32* keys, const u32* places, const u32* counts, i64 n,
          i64 chunks, i64 shift, i64 first) {
    __shared__ u16 count[WARPS][DIGITS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < WARPS * DIGITS; i += CHUNK) count[i / DIGITS][i % DIGITS] = 0;
    __syncthreads();
    i64 i = i64(blockIdx.x) * CHUNK + threadIdx.x;
    u32 key = i < n ? keys[i] : 0;
    // Numbers beyond the end have a separate digit.
    int digit = i < n ? int(key >> shift & (DIGITS - 1)) : DIGITS;
    u32 same = ~0u;
    for (int bit = 0; bit < 9; bit++) {
        bool is_set = digit >> bit & 1;
        u32 votes = __ballot_sync(~0u, is_set);
        same &= is_set ? votes : ~votes;
    }
    int rank = __popc(same & ((1u << lane) - 1));
    if (rank == 0 && i < n) count[warp][digit] = u16(__popc(same));
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        u16 before = 0;
        for (int w = 0; w < WARPS; w++) {
            u16 x = count[w][threadIdx.x];
            count[w][threadIdx.x] = before;
            before += x;
        }
    }
    __syncthreads();
    if (i < n) {
        u32 to = counts[digit * chunks + blockIdx.x] + count[warp][digit] + rank;
        keys_to[to] = key;
        places_to[to] = first ? u32(i) : places[i];
    }
}
