// Statistics with the exact Σ x² as one f32, infinite if there are elements that are not finite: of the digits, each of 16
// bits and the first of weight 2⁻³⁰⁴, which were added over ranks without carries. Two elements follow them.

const int DIGITS = 40;

extern "C" __global__ void round_stats(f32* result, const f32* stats) {
    if (global_thread() > 0) return;
    u32 digits[DIGITS];
    u64 carry = 0;
    // Unrolled, since digits at an index that is not known would be in local memory.
#pragma unroll
    for (int i = 0; i < DIGITS; i++) {
        u64 digit = u64(stats[1 + i]) + carry;
        digits[i] = u32(digit & 0xffff);
        carry = digit >> 16;
    }
    f64 whole = f64(carry);
#pragma unroll
    for (int i = DIGITS - 1; i >= 0; i--) whole = whole * 65536.0 + f64(digits[i]);
    f64 least = __longlong_as_double(i64(1023 - 304) << 52);
    result[0] = stats[0];
    result[1] = stats[0] == 0.0f ? f32(whole * least) : __uint_as_float(0x7f800000);
    result[2] = stats[1 + DIGITS];
    result[3] = stats[2 + DIGITS];
}
