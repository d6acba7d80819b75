// Philox4x32-10 (Salmon et al. 2011): number i is word i % 4 of the block whose counter is i / 4 and the number of the
// tensor. Element e of n is number position * n + e. The state is [seed, rank, count, ranks, accumulation]; a position
// counts micro-steps in the order of the data.

struct Four { u32 at[4]; };

__device__ __forceinline__ Four philox(u64 block, u32 id, u64 key) {
    u32 c0 = u32(block), c1 = u32(block >> 32), c2 = id, c3 = 0;
    u32 k0 = u32(key), k1 = u32(key >> 32);
    for (int round = 0; round < 10; round++) {
        u64 a = u64(0xd2511f53u) * c0, b = u64(0xcd9e8d57u) * c2;
        u32 c1_next = u32(b), c3_next = u32(a);
        c0 = u32(b >> 32) ^ c1 ^ k0;
        c2 = u32(a >> 32) ^ c3 ^ k1;
        c1 = c1_next;
        c3 = c3_next;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return Four{{c0, c1, c2, c3}};
}

__device__ __forceinline__ u64 first_number(const i64* state, i64 n) {
    u64 accumulation = state[4] > 1 ? u64(state[4]) : 1, count = u64(state[2]);
    u64 part = count / accumulation * u64(state[3]) + u64(state[1]);
    return (part * accumulation + count % accumulation) * u64(n);
}
