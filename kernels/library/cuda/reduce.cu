// y[i] = fold of x over the reduced axes, for the positions i of the kept axes.
//
// A block computes X results; of its 256 threads, 256 / X share one and stride over its elements, and their parts are
// combined in a fixed order. Blocks in y share the elements of a result and store parts that are reduced again.
//
// To be defined: FROM and TO, the elements; FOLD (SUM, MEAN, PROD, MAX or MIN); X.

#define SUM 0
#define MEAN 1
#define PROD 2
#define MAX 3
#define MIN 4

typedef Number<FROM>::Wide Value;
const int BLOCK = 256;
const int Y = BLOCK / X;

__device__ __forceinline__ Value fold(Value a, Value b) {
#if FOLD == PROD
    return a * b;
#elif FOLD == MAX
    // A NaN propagates, as comparisons with it are false.
    return b > a || b != b ? b : a;
#elif FOLD == MIN
    return b < a || b != b ? b : a;
#else
    return a + b;
#endif
}

// The neutral element, by its bits as f64 or i64.
__device__ __forceinline__ Value start_of(i64 bits) {
    return Value(0.5) == 0 ? Value(bits) : Value(__longlong_as_double(bits));
}

// `neutral` is the result of an empty fold; a mean is divided by `divisor` (1 for parts).
extern "C" __global__ void __launch_bounds__(BLOCK)
reduce(TO* y, const FROM* x, Axes kept, Axes gone, i64 results, i64 count, i64 divisor, i64 neutral) {
    __shared__ Value parts[Y][X];
    int column = threadIdx.x % X, row = threadIdx.x / X;
    Value start = start_of(neutral);
    i64 each = (count + gridDim.y - 1) / gridDim.y;
    i64 begin = blockIdx.y * each, end = begin + each < count ? begin + each : count;
    for (i64 first = i64(blockIdx.x) * X; first < results; first += i64(gridDim.x) * X) {
        i64 result = first + column;
        Value value = start;
        if (result < results) {
            const FROM* at = x + kept.place(result, results);
            for (i64 i = begin + row; i < end; i += Y) value = fold(value, widen(at[gone.place(i, count)]));
        }
        parts[row][column] = value;
        __syncthreads();
        for (int half = Y / 2; half > 0; half /= 2) {
            if (row < half) parts[row][column] = fold(parts[row][column], parts[row + half][column]);
            __syncthreads();
        }
        if (row == 0 && result < results) {
            value = parts[0][column];
            if (FOLD == MEAN) value = value / Value(divisor);
            y[i64(blockIdx.y) * results + result] = to(value, TO());
        }
        __syncthreads();
    }
}
