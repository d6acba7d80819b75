// The blocks of one launch that read many arrays, each block a part of one.
//
// To be defined: T, the elements; ARRAYS, how many arrays a launch reads.

struct Arrays {
    const T* at[ARRAYS];
};

// Of each array its length, and the block after its last.
struct Sizes {
    i64 n[ARRAYS];
    i64 end[ARRAYS];
};

// The array of a block: its elements, how many blocks share it, and which of these this one is.
struct Share {
    const T* x;
    i64 n, blocks, block;
};

__device__ __forceinline__ Share share_of_block(const Arrays& arrays, const Sizes& sizes) {
    const T* x = arrays.at[0];
    i64 n = sizes.n[0], begin = 0, end = sizes.end[0];
    // Indices that are not known when it is compiled would put the arrays into local memory.
#pragma unroll
    for (int i = 1; i < ARRAYS; i++) {
        if (blockIdx.x < sizes.end[i - 1]) continue;
        x = arrays.at[i];
        n = sizes.n[i];
        begin = sizes.end[i - 1];
        end = sizes.end[i];
    }
    return Share{x, n, end - begin, blockIdx.x - begin};
}
