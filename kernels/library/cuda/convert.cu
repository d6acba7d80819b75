// y[i] = x[i] rounded to another element type: floats to nearest even, or toward zero and within range
// to an integer; integers wrap.

const int WIDTH = 16 / (sizeof(FROM) > sizeof(TO) ? sizeof(FROM) : sizeof(TO));

extern "C" __global__ void convert(TO* y, const FROM* x, i64 n) {
    typedef Pack<FROM, WIDTH> In;
    typedef Pack<TO, WIDTH> Out;
    i64 whole = aligned(x, sizeof(In)) && aligned(y, sizeof(Out)) ? n / WIDTH : 0;
    for (i64 i = global_thread(); i < whole; i += global_threads()) {
        In in = reinterpret_cast<const In*>(x)[i];
        Out out;
        for (int j = 0; j < WIDTH; j++) out.at[j] = to(widen(in.at[j]), TO());
        reinterpret_cast<Out*>(y)[i] = out;
    }
    for (i64 i = whole * WIDTH + global_thread(); i < n; i += global_threads())
        y[i] = to(widen(x[i]), TO());
}
