// Tensor core MMAs on tiles of 2-byte elements in shared memory.
//
// A warp multiplies 16×16 by 16×8. Its lane l holds, of the result, rows l/4 and l/4 + 8, columns 2(l%4) and 2(l%4) +
// 1. Rows of tiles are 16 bytes longer than their elements, so that the eight rows of an 8×8 matrix lie in different
// banks.

[[maybe_unused]] const int PAD = 8;

__device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    mma_bf16(c, a, b0, b1);
}
__device__ __forceinline__ void mma(f32 (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    mma_f16(c, a, b0, b1);
}
__device__ __forceinline__ u32 pair(f32 low, f32 high, bf16) { return f32_to_bf16x2(low, high); }
__device__ __forceinline__ u32 pair(f32 low, f32 high, f16) { return f32_to_f16x2(low, high); }
