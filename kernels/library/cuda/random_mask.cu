// Random masks by Philox4x32-10 (Salmon et al. 2011): element e is true if word e % 4 of the block whose
// counter is e / 4, the number of the mask and the count of its uses is below `limit`. The state is
// [seed, rank, count]; seed and rank are the key.

extern "C" __global__ void random_mask(u8* mask, const i64* state, i64 n, i64 id, i64 limit) {
    for (i64 block = global_thread(); block * 4 < n; block += global_threads()) {
        u32 c0 = u32(block), c1 = u32(u64(block) >> 32), c2 = u32(id), c3 = u32(state[2]);
        u32 k0 = u32(state[0]), k1 = u32(state[1]);
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
        u32 words[4] = {c0, c1, c2, c3};
        Pack<u8, 4> four;
        for (int i = 0; i < 4; i++) four.at[i] = i64(words[i]) < limit;
        if (block * 4 + 4 <= n && aligned(mask, 4)) reinterpret_cast<Pack<u8, 4>*>(mask)[block] = four;
        else
            for (int i = 0; i < 4 && block * 4 + i < n; i++) mask[block * 4 + i] = four.at[i];
    }
}
