// Adds the operand of this number to a sum in a balanced binary tree. Level i waits with the sum of 2ⁱ operands; results
// may be where the levels are.
//
// To be defined: LEVELS.

struct Levels {
    f32* at[LEVELS];
};

extern "C" __global__ void __launch_bounds__(256)
    tree_sum(const f32* x, const i64* number, Levels from, Levels to, i64 n) {
    i64 k = *number;
    int merged = 0;
    while (merged < LEVELS && (k >> merged & 1) != 0) merged++;
    int place = merged == LEVELS ? 0 : merged;
    for (i64 i = global_thread(); i < n; i += global_threads()) {
        f32 sum = x[i];
        // Indices that are not known when it is compiled would put the levels into local memory.
#pragma unroll
        for (int level = 0; level < LEVELS; level++)
            if (level < merged) sum = __fadd_rn(from.at[level][i], sum);
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (level == place) to.at[level][i] = sum;
            else if (to.at[level] != from.at[level]) to.at[level][i] = from.at[level][i];
        }
    }
}
