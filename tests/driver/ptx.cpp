// An interpreter of the PTX that code generation writes: threads run one after the other until they wait for
// others; every access to memory is checked. What it does not know is an error when the module is loaded.
#include "module.h"
#include "number.h"
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <span>
#include <sstream>
#include <unordered_map>

namespace device {
namespace {
enum State { RUNNING, AT_BARRIER, AT_SHUFFLE, DONE };
const u32 SPECIALS = 10;
const char* SPECIAL[SPECIALS] = {"%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y",
                                 "%ctaid.z", "%ntid.x", "%nctaid.x", "%nctaid.y", "%laneid"};

struct Thread {
    std::vector<u64> registers;
    u32 at = 0;
    State state = RUNNING;
    std::span<u8> shared;
    void** parameters;
};

// A register, or a number.
struct Operand { bool is_number = false; u64 number = 0; u32 slot = 0; };

struct Instruction {
    void (*run)(Thread&, const Instruction&) = nullptr;
    Operand condition;
    bool is_conditional = false, is_negated = false;
    std::vector<Operand> to, from;
    u64 offset = 0;
    u32 target = 0;
    std::string text;
};

struct Function {
    std::vector<Instruction> code;
    u32 n_registers = SPECIALS;
    u32 shared_bytes = 0;
    // Where the shared memory that the launch adds begins.
    u32 dynamic_shared() const { return (shared_bytes + 15) / 16 * 16; }
};

template <class T> T get(Thread& t, const Operand& o) {
    T value;
    memcpy(&value, o.is_number ? &o.number : &t.registers[o.slot], sizeof(T));
    return value;
}
template <class T> void set(Thread& t, const Operand& o, T value) {
    u64 bits = 0;
    memcpy(&bits, &value, sizeof(T));
    t.registers[o.slot] = bits;
}

// NaN is saturated to 0.
float saturate(float x) { return std::fmin(std::fmax(x, 0.0f), 1.0f); }
float from_bf16(u16 x) { return float(load_bf16(&x)); }
u16 to_bf16(float x) { u16 bits; store_bf16(&bits, x); return bits; }
float from_f16(u16 x) { return float(load_f16(&x)); }
u16 to_f16(float x) { u16 bits; store_f16(&bits, x); return bits; }

// Subnormal numbers are zero.
float flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

typedef void (*Run)(Thread&, const Instruction&);
// `D` and `S` are the types of the result and of the operands.
template <class D, class S, auto F> void one(Thread& t, const Instruction& i) { set<D>(t, i.to[0], F(get<S>(t, i.from[0]))); }
template <class D, class S, auto F> void two(Thread& t, const Instruction& i) {
    set<D>(t, i.to[0], F(get<S>(t, i.from[0]), get<S>(t, i.from[1])));
}
template <class D, class S, auto F> void three(Thread& t, const Instruction& i) {
    set<D>(t, i.to[0], F(get<S>(t, i.from[0]), get<S>(t, i.from[1]), get<S>(t, i.from[2])));
}
template <class T> void select(Thread& t, const Instruction& i) {
    set<T>(t, i.to[0], get<T>(t, i.from[get<u8>(t, i.from[2]) ? 0 : 1]));
}
// Several registers and one of all their bits.
template <class Whole, class Part> void move(Thread& t, const Instruction& i) {
    Whole whole = 0;
    const u32 width = sizeof(Part) * 8;
    for (size_t j = 0; j < i.from.size(); j++)
        whole |= i.from.size() == 1 ? get<Whole>(t, i.from[0]) : Whole(get<Part>(t, i.from[j])) << (j * width);
    for (size_t j = 0; j < i.to.size(); j++)
        i.to.size() == 1 ? set<Whole>(t, i.to[0], whole) : set<Part>(t, i.to[j], Part(whole >> (j * width)));
}
template <class T> void read_parameter(Thread& t, const Instruction& i) {
    T value;
    memcpy(&value, t.parameters[i.from[0].number], sizeof(T));
    set<T>(t, i.to[0], value);
}
template <class T, u32 N> void read_global(Thread& t, const Instruction& i) {
    auto* at = reinterpret_cast<const T*>(get<u64>(t, i.from[0]) + i.offset);
    check_access(at, sizeof(T) * N, sizeof(T) * N);
    for (u32 j = 0; j < N; j++) set<T>(t, i.to[j], at[j]);
}
void prefetch(Thread& t, const Instruction& i) { check_access(reinterpret_cast<const u8*>(get<u64>(t, i.to[0]) + i.offset), 1, 1); }
template <class T, u32 N> void write_global(Thread& t, const Instruction& i) {
    auto* at = reinterpret_cast<T*>(get<u64>(t, i.to[0]) + i.offset);
    check_access(at, sizeof(T) * N, sizeof(T) * N);
    for (u32 j = 0; j < N; j++) at[j] = get<T>(t, i.from[j]);
}
u8* shared_access(Thread& t, u64 at, size_t bytes) {
    if (at % bytes != 0) throw Fault{MISALIGNED};
    if (at + bytes > t.shared.size()) throw Fault{ILLEGAL_ADDRESS};
    return t.shared.data() + at;
}
template <class T, u32 N> void read_shared(Thread& t, const Instruction& i) {
    u8* at = shared_access(t, get<u64>(t, i.from[0]) + i.offset, sizeof(T) * N);
    for (u32 j = 0; j < N; j++) { T x; memcpy(&x, at + j * sizeof(T), sizeof(T)); set<T>(t, i.to[j], x); }
}
template <class T, u32 N> void write_shared(Thread& t, const Instruction& i) {
    u8* at = shared_access(t, get<u64>(t, i.to[0]) + i.offset, sizeof(T) * N);
    for (u32 j = 0; j < N; j++) { T x = get<T>(t, i.from[j]); memcpy(at + j * sizeof(T), &x, sizeof(T)); }
}
void jump(Thread& t, const Instruction& i) { t.at = i.target; }
void leave(Thread& t, const Instruction&) { t.state = DONE; }
void barrier(Thread& t, const Instruction&) { t.state = AT_BARRIER; }
void shuffle(Thread& t, const Instruction&) { t.state = AT_SHUFFLE; }
void pack_bf16(Thread& t, const Instruction& i) {
    set<u32>(t, i.to[0], u32(to_bf16(get<float>(t, i.from[0]))) << 16 | to_bf16(get<float>(t, i.from[1])));
}
void pack_f16(Thread& t, const Instruction& i) {
    set<u32>(t, i.to[0], u32(to_f16(get<float>(t, i.from[0]))) << 16 | to_f16(get<float>(t, i.from[1])));
}
// Both halves of two registers.
template <auto LOAD, auto STORE, auto F> u32 pair(u32 a, u32 b) {
    auto half = [](u32 x, u32 y) { return u32(STORE(F(LOAD(u16(x)), LOAD(u16(y))))); };
    return half(a >> 16, b >> 16) << 16 | half(a, b);
}
// A product and a sum with one rounding, of one half and of both halves.
template <auto LOAD, auto STORE> u16 fused(u16 a, u16 b, u16 c) {
    return STORE(float(std::fma(double(LOAD(a)), double(LOAD(b)), double(LOAD(c)))));
}
template <auto LOAD, auto STORE> u32 fused_pair(u32 a, u32 b, u32 c) {
    u16 high = fused<LOAD, STORE>(u16(a >> 16), u16(b >> 16), u16(c >> 16));
    return u32(high) << 16 | fused<LOAD, STORE>(u16(a), u16(b), u16(c));
}
u64 bits_of(u64 a, u32 from, u32 count) {
    u64 rest = from >= 64 ? 0 : a >> from;
    return count >= 64 ? rest : rest & ((u64(1) << count) - 1);
}
template <class T> void extract(Thread& t, const Instruction& i) {
    set<T>(t, i.to[0], T(bits_of(get<T>(t, i.from[0]), get<u32>(t, i.from[1]) & 255, get<u32>(t, i.from[2]) & 255)));
}
u32 permute(u32 a, u32 b, u32 how) {
    u64 bytes = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; i++) result |= u32(u8(bytes >> (how >> (4 * i) & 7) * 8)) << (8 * i);
    return result;
}
// A shift by more than the width gives zero, or the sign.
template <class T> T shift_left(T a, u32 by) { return by >= sizeof(T) * 8 ? T(0) : T(a << by); }
template <class T> T shift_right(T a, u32 by) {
    const u32 width = sizeof(T) * 8;
    return by < width ? T(a >> by) : T(a >> (width - 1) >> 1);
}
template <class T, auto F> void shifted(Thread& t, const Instruction& i) {
    set<T>(t, i.to[0], F(get<T>(t, i.from[0]), get<u32>(t, i.from[1])));
}
template <class T> T maximum(T a, T b) { return a != a || b != b ? T(NAN) : a > b ? a : b; }
template <class T> T minimum(T a, T b) { return a != a || b != b ? T(NAN) : a < b ? a : b; }

#define F1(T, expression) ([](T a) { return (expression); })
#define F2(T, expression) ([](T a, T b) { return (expression); })
#define F3(T, expression) ([](T a, T b, T c) { return (expression); })
#define COMPARE(name, T) \
    {"setp.eq." name, two<u8, T, F2(T, u8(a == b))>}, {"setp.ne." name, two<u8, T, F2(T, u8(a != b && a == a && b == b))>}, \
    {"setp.lt." name, two<u8, T, F2(T, u8(a < b))>}, {"setp.le." name, two<u8, T, F2(T, u8(a <= b))>}, \
    {"setp.gt." name, two<u8, T, F2(T, u8(a > b))>}, {"setp.ge." name, two<u8, T, F2(T, u8(a >= b))>}
// Not ordered: also true for what is not a number.
#define UNORDERED(name, T) \
    {"setp.neu." name, two<u8, T, F2(T, u8(!(a == b)))>}, {"setp.nan." name, two<u8, T, F2(T, u8(a != a || b != b))>}, \
    {"setp.ltu." name, two<u8, T, F2(T, u8(!(a >= b)))>}, {"setp.gtu." name, two<u8, T, F2(T, u8(!(a <= b)))>}, \
    {"setp.leu." name, two<u8, T, F2(T, u8(!(a > b)))>}, {"setp.geu." name, two<u8, T, F2(T, u8(!(a < b)))>}, \
    {"setp.num." name, two<u8, T, F2(T, u8(a == a && b == b))>}, {"setp.equ." name, two<u8, T, F2(T, u8(!(a < b || a > b)))>}
#define INTEGER(u, s, bits, U, S) \
    {"add." s, two<U, U, F2(U, U(a + b))>}, {"sub." s, two<U, U, F2(U, U(a - b))>}, \
    {"mul.lo." s, two<U, U, F2(U, U(a * b))>}, {"mad.lo." s, three<U, U, F3(U, U(a * b + c))>}, \
    {"and." bits, two<U, U, F2(U, U(a & b))>}, {"or." bits, two<U, U, F2(U, U(a | b))>}, \
    {"xor." bits, two<U, U, F2(U, U(a ^ b))>}, {"not." bits, one<U, U, F1(U, U(~a))>}, \
    {"shl." bits, shifted<U, shift_left<U>>}, {"shr." u, shifted<U, shift_right<U>>}, {"shr." s, shifted<S, shift_right<S>>}, \
    {"min." u, two<U, U, F2(U, a < b ? a : b)>}, {"max." u, two<U, U, F2(U, a > b ? a : b)>}, \
    {"min." s, two<S, S, F2(S, a < b ? a : b)>}, {"max." s, two<S, S, F2(S, a > b ? a : b)>}, \
    {"neg." s, one<U, U, F1(U, U(0 - a))>}, {"selp." bits, select<U>}, \
    {"div." u, two<U, U, F2(U, b ? U(a / b) : U(~U(0)))>}, {"rem." u, two<U, U, F2(U, b ? U(a % b) : a)>}, \
    {"div." s, two<S, S, F2(S, b ? S(a / b) : S(-1))>}, {"rem." s, two<S, S, F2(S, b ? S(a % b) : a)>}, \
    COMPARE(u, U), COMPARE(s, S), {"setp.eq." bits, two<u8, U, F2(U, u8(a == b))>}, {"setp.ne." bits, two<u8, U, F2(U, u8(a != b))>}
#define FLOAT(f, T) \
    {"add.rn." f, two<T, T, F2(T, a + b)>}, {"sub.rn." f, two<T, T, F2(T, a - b)>}, {"mul.rn." f, two<T, T, F2(T, a * b)>}, \
    {"div.rn." f, two<T, T, F2(T, a / b)>}, {"rcp.rn." f, one<T, T, F1(T, T(1) / a)>}, {"fma.rn." f, three<T, T, F3(T, std::fma(a, b, c))>}, \
    {"sqrt.rn." f, one<T, T, F1(T, std::sqrt(a))>}, {"neg." f, one<T, T, F1(T, -a)>}, {"abs." f, one<T, T, F1(T, std::fabs(a))>}, \
    {"max.NaN." f, two<T, T, maximum<T>>}, {"min.NaN." f, two<T, T, minimum<T>>}, {"selp." f, select<T>}, \
    {"max." f, two<T, T, F2(T, std::fmax(a, b))>}, {"min." f, two<T, T, F2(T, std::fmin(a, b))>}, \
    {"copysign." f, two<T, T, F2(T, std::copysign(b, a))>}, COMPARE(f, T), UNORDERED(f, T)
#define HALF_COMPARE(name, f, load, sign) {"setp." name "." f, two<u8, u16, F2(u16, u8(load(a) sign load(b)))>}
#define HALF(f, load, store) \
    {"add.rn." f "x2", two<u32, u32, pair<load, store, F2(float, a + b)>>}, \
    {"sub.rn." f "x2", two<u32, u32, pair<load, store, F2(float, a - b)>>}, \
    {"mul.rn." f "x2", two<u32, u32, pair<load, store, F2(float, a * b)>>}, \
    {"fma.rn." f "x2", three<u32, u32, fused_pair<load, store>>}, {"fma.rn." f, three<u16, u16, fused<load, store>>}, \
    {"add.rn." f, two<u16, u16, F2(u16, store(load(a) + load(b)))>}, {"sub.rn." f, two<u16, u16, F2(u16, store(load(a) - load(b)))>}, \
    {"mul.rn." f, two<u16, u16, F2(u16, store(load(a) * load(b)))>}, \
    HALF_COMPARE("gt", f, load, >), HALF_COMPARE("lt", f, load, <), HALF_COMPARE("ge", f, load, >=), \
    HALF_COMPARE("le", f, load, <=), HALF_COMPARE("eq", f, load, ==), \
    {"setp.nan." f, two<u8, u16, F2(u16, u8(load(a) != load(a) || load(b) != load(b)))>}, \
    {"max.NaN." f, two<u16, u16, F2(u16, store(maximum<float>(load(a), load(b))))>}, \
    {"min.NaN." f, two<u16, u16, F2(u16, store(minimum<float>(load(a), load(b))))>}, \
    {"abs." f, one<u16, u16, F1(u16, u16(a & 0x7fff))>}, {"neg." f, one<u16, u16, F1(u16, u16(a ^ 0x8000))>}
#define MEMORY(space, read, write, b, T) \
    {"ld." space "." b, read<T, 1>}, {"ld." space ".v2." b, read<T, 2>}, {"ld." space ".v4." b, read<T, 4>}, \
    {"st." space "." b, write<T, 1>}, {"st." space ".v2." b, write<T, 2>}, {"st." space ".v4." b, write<T, 4>}

const std::unordered_map<std::string, Run>& instructions() {
    static const std::unordered_map<std::string, Run> all = {
        INTEGER("u16", "s16", "b16", u16, int16_t), INTEGER("u32", "s32", "b32", u32, int32_t),
        INTEGER("u64", "s64", "b64", u64, int64_t), FLOAT("f32", float), FLOAT("f64", double),
        MEMORY("global", read_global, write_global, "b8", u8), MEMORY("global", read_global, write_global, "b16", u16),
        MEMORY("global", read_global, write_global, "b32", u32), MEMORY("global", read_global, write_global, "b64", u64),
        MEMORY("shared", read_shared, write_shared, "b8", u8), MEMORY("shared", read_shared, write_shared, "b16", u16),
        MEMORY("shared", read_shared, write_shared, "b32", u32), MEMORY("shared", read_shared, write_shared, "b64", u64),
        {"ld.param.b64", read_parameter<u64>}, {"ld.param.b32", read_parameter<u32>},
        {"cvta.to.global.u64", move<u64, u32>}, {"cvta.shared.u64", move<u64, u32>},
        {"mov.b64", move<u64, u32>}, {"mov.u64", move<u64, u32>}, {"mov.b32", move<u32, u16>}, {"mov.u32", move<u32, u16>},
        {"mov.b16", move<u16, u8>}, {"mov.f32", move<u32, u16>}, {"mov.f64", move<u64, u32>}, {"mov.pred", move<u8, u8>},
        {"and.pred", two<u8, u8, F2(u8, u8(a & b))>}, {"or.pred", two<u8, u8, F2(u8, u8(a | b))>},
        {"xor.pred", two<u8, u8, F2(u8, u8(a ^ b))>}, {"not.pred", one<u8, u8, F1(u8, u8(!a))>},
        {"mul.wide.u32", two<u64, u32, F2(u32, u64(a) * b)>}, {"mul.wide.s32", two<int64_t, int32_t, F2(int32_t, int64_t(a) * b)>},
        {"mul.wide.u16", two<u32, u16, F2(u16, u32(a) * b)>}, {"mul.hi.u16", two<u16, u16, F2(u16, u16(u32(a) * b >> 16))>},
        {"mul.hi.u32", two<u32, u32, F2(u32, u32(u64(a) * b >> 32))>},
        {"mul.hi.u64", two<u64, u64, F2(u64, u64((unsigned __int128)a * b >> 64))>},
        {"cvt.u64.u32", one<u64, u32, F1(u32, u64(a))>}, {"cvt.s64.s32", one<int64_t, int32_t, F1(int32_t, int64_t(a))>},
        {"cvt.u32.u64", one<u32, u64, F1(u64, u32(a))>}, {"cvt.u32.u16", one<u32, u16, F1(u16, u32(a))>},
        {"cvt.u16.u32", one<u16, u32, F1(u32, u16(a))>}, {"cvt.u16.u64", one<u16, u64, F1(u64, u16(a))>},
        {"cvt.u64.u16", one<u64, u16, F1(u16, u64(a))>}, {"cvt.s32.s16", one<int32_t, int16_t, F1(int16_t, int32_t(a))>},
        {"cvt.rn.f32.s32", one<float, int32_t, F1(int32_t, float(a))>}, {"cvt.rn.f32.u32", one<float, u32, F1(u32, float(a))>},
        {"cvt.rn.f32.s64", one<float, int64_t, F1(int64_t, float(a))>}, {"cvt.rn.f32.u16", one<float, u16, F1(u16, float(a))>},
        {"cvt.rn.f64.s32", one<double, int32_t, F1(int32_t, double(a))>}, {"cvt.rn.f64.s64", one<double, int64_t, F1(int64_t, double(a))>},
        {"cvt.rzi.s64.f32", one<int64_t, float, F1(float, int64_t(a))>}, {"cvt.rzi.s32.f32", one<int32_t, float, F1(float, int32_t(a))>},
        {"cvt.f64.f32", one<double, float, F1(float, double(a))>}, {"cvt.rn.f32.f64", one<float, double, F1(double, float(a))>},
        {"cvt.rmi.f32.f32", one<float, float, F1(float, std::floor(a))>}, {"cvt.rpi.f32.f32", one<float, float, F1(float, std::ceil(a))>},
        {"cvt.rmi.f64.f64", one<double, double, F1(double, std::floor(a))>}, {"cvt.rni.f32.f32", one<float, float, F1(float, std::nearbyint(a))>},
        {"cvt.f32.bf16", one<float, u16, from_bf16>}, {"cvt.rn.bf16.f32", one<u16, float, to_bf16>},
        {"cvt.f32.f16", one<float, u16, from_f16>}, {"cvt.rn.f16.f32", one<u16, float, to_f16>},
        {"cvt.rn.bf16x2.f32", pack_bf16}, {"cvt.rn.f16x2.f32", pack_f16},
        HALF("f16", from_f16, to_f16), HALF("bf16", from_bf16, to_bf16),
        {"bfe.u32", extract<u32>}, {"bfe.u64", extract<u64>},
        {"prmt.b32", three<u32, u32, permute>}, {"shfl.sync.bfly.b32", shuffle}, {"bar.sync", barrier}, {"prefetch.L2", prefetch},
        {"fma.rn.sat.f32", three<float, float, F3(float, saturate(std::fma(a, b, c)))>},
        {"ex2.approx.ftz.f32", one<float, float, F1(float, flush(std::exp2(flush(a))))>},
        {"bra", jump}, {"bra.uni", jump}, {"ret", leave},
    };
    return all;
}

[[noreturn]] void stuck() {
    violate("threads of a block wait in different places");
    throw Fault{LAUNCH_FAILED};
}

// The lanes of a warp exchange what they hold.
void exchange(const Function& f, Thread* lanes) {
    const Instruction& i = f.code[lanes[0].at - 1];
    u32 values[32];
    for (u32 l = 0; l < 32; l++) values[l] = get<u32>(lanes[l], i.from[0]);
    for (u32 l = 0; l < 32; l++) {
        if (get<u32>(lanes[l], i.from[3]) != ~0u) stuck();
        set<u32>(lanes[l], i.to[0], values[l ^ (get<u32>(lanes[l], i.from[1]) & 31)]);
        lanes[l].state = RUNNING;
    }
}

void run_thread(const Function& f, Thread& t) {
    while (t.state == RUNNING) {
        const Instruction& i = f.code[t.at++];
        if (i.is_conditional && (get<u8>(t, i.condition) != 0) == i.is_negated) continue;
        i.run(t, i);
    }
}

void run_block(const Function& f, std::vector<Thread>& threads) {
    for (;;) {
        u32 waiting = 0, done = 0;
        bool moved = false;
        for (size_t first = 0; first < threads.size(); first += 32) {
            size_t end = std::min(first + 32, threads.size());
            u32 meeting = 0;
            for (size_t i = first; i < end; i++) {
                moved |= threads[i].state == RUNNING;
                run_thread(f, threads[i]);
                meeting += threads[i].state == AT_SHUFFLE && threads[i].at == threads[first].at;
                waiting += threads[i].state == AT_BARRIER;
                done += threads[i].state == DONE;
            }
            // All 32 of them, as the mask says.
            if (meeting == 32) exchange(f, &threads[first]), moved = true;
        }
        if (done == threads.size()) return;
        if (waiting > 0 && waiting + done == threads.size()) {
            for (Thread& t : threads)
                if (t.state == AT_BARRIER) t.state = RUNNING;
        } else if (!moved) {
            stuck();
        }
    }
}

void run(const Function& f, const Launch& l, void** parameters) {
    std::vector<u8> shared(f.dynamic_shared() + l.shared);
    std::vector<Thread> threads(l.block[0]);
    for (u32 z = 0; z < l.grid[2]; z++)
        for (u32 y = 0; y < l.grid[1]; y++)
            for (u32 x = 0; x < l.grid[0]; x++) {
                memset(shared.data(), 0xff, shared.size());
                for (u32 i = 0; i < threads.size(); i++) {
                    Thread& t = threads[i];
                    t.registers.assign(f.n_registers, ~u64(0));
                    t.at = 0, t.state = RUNNING, t.shared = shared, t.parameters = parameters;
                    const u32 special[SPECIALS] = {i, 0, 0, x, y, z, l.block[0], l.grid[0], l.grid[1], i % 32};
                    std::copy(special, special + SPECIALS, t.registers.begin());
                }
                run_block(f, threads);
            }
}

// The lines of one entry, and what its names are.
struct Parser {
    Function& f;
    Kernel& kernel;
    std::string& log;
    std::unordered_map<std::string, u32> slots, labels;
    std::unordered_map<std::string, u64> symbols;
    // Names of the shared memory that launches add.
    const std::vector<std::string>& dynamic_shared;
    std::vector<std::string> targets;

    u32 slot(const std::string& name) {
        auto found = slots.find(name);
        if (found != slots.end()) return found->second;
        return slots[name] = f.n_registers++;
    }
    Operand operand(const std::string& text) {
        Operand o;
        auto symbol = symbols.find(text);
        bool digit = isdigit(text[0]) || (text[0] == '-' && text.size() > 1);
        if (symbol != symbols.end() || digit) {
            o.is_number = true;
            if (symbol != symbols.end()) {
                o.number = symbol->second;
            } else if (text[0] == '0' && text.size() > 2 && strchr("fFdD", text[1])) {
                o.number = strtoull(text.c_str() + 2, nullptr, 16);
            } else {
                o.number = text[0] == '-' ? u64(strtoll(text.c_str(), nullptr, 0)) : strtoull(text.c_str(), nullptr, 0);
            }
            return o;
        }
        o.slot = slot(text);
        return o;
    }
    // Divides at commas; what is in braces becomes several operands.
    static std::vector<std::vector<std::string>> split(const std::string& text) {
        std::vector<std::vector<std::string>> groups(1);
        std::string word;
        bool inside = false;
        auto end = [&] {
            if (!word.empty()) groups.back().push_back(word);
            word.clear();
        };
        for (char c : text) {
            if (c == '{' || c == '}') inside = c == '{';
            else if (c == ',') { end(); if (!inside) groups.emplace_back(); }
            else if (!isspace(c)) word += c;
        }
        end();
        return groups;
    }
    std::vector<Operand> operands(const std::vector<std::string>& words, Instruction& i) {
        std::vector<Operand> all;
        for (std::string word : words) {
            if (word[0] == '[') {
                word = word.substr(1, word.size() - 2);
                size_t plus = word.find('+');
                if (plus != std::string::npos) i.offset = u64(strtoll(word.c_str() + plus + 1, nullptr, 0));
                word = word.substr(0, plus);
            }
            all.push_back(operand(word));
        }
        return all;
    }
    bool statement(std::string line) {
        Instruction i;
        i.text = line;
        if (line[0] == '@') {
            size_t space = line.find_first_of(" \t");
            i.is_conditional = true;
            i.is_negated = line[1] == '!';
            i.condition = operand(line.substr(i.is_negated ? 2 : 1, space - (i.is_negated ? 2 : 1)));
            line = line.substr(line.find_first_not_of(" \t", space));
        }
        size_t space = std::min(line.find_first_of(" \t"), line.size());
        std::string name = line.substr(0, space);
        auto known = instructions().find(name);
        if (known == instructions().end()) {
            log = "unknown instruction `" + i.text + "`";
            return false;
        }
        i.run = known->second;
        auto groups = split(line.substr(space));
        std::string target;
        if (i.run == jump) target = groups[0][0];
        else if (i.run == barrier || i.run == leave) groups.clear();
        else i.to = operands(groups[0], i);
        for (size_t g = 1; g < groups.size(); g++)
            for (const Operand& o : operands(groups[g], i)) i.from.push_back(o);
        f.code.push_back(std::move(i));
        targets.push_back(target);
        return true;
    }
    bool body(std::istream& text) {
        for (u32 i = 0; i < SPECIALS; i++) slots[SPECIAL[i]] = i;
        for (const std::string& name : dynamic_shared) symbols[name] = 0;
        std::string line;
        int depth = 0;
        while (std::getline(text, line)) {
            size_t comment = line.find("//");
            if (comment != std::string::npos) line.resize(comment);
            size_t begin = line.find_first_not_of(" \t"), end = line.find_last_not_of(" \t\r");
            if (begin == std::string::npos) continue;
            line = line.substr(begin, end - begin + 1);
            if (line == "{") { depth++; continue; }
            if (line == "}") { if (--depth == 0) break; continue; }
            if (line.rfind(".param", 0) == 0) {
                bool is_last = line.back() != ',';
                std::string name = line.substr(line.find_last_of(" \t") + 1);
                if (!is_last) name.pop_back();
                symbols[name] = kernel.parameters.size();
                std::istringstream words(line);
                std::string kind;
                words >> kind >> kind;
                kernel.parameters.push_back(u32(atoi(kind.c_str() + 2)) / 8);
            } else if (line.rfind(".shared", 0) == 0) {
                size_t bracket = line.find('['), name = line.find_last_of(" \t", bracket) + 1;
                size_t align = size_t(atoi(line.c_str() + line.find(".align") + 6));
                f.shared_bytes = u32((f.shared_bytes + align - 1) / align * align);
                symbols[line.substr(name, bracket - name)] = f.shared_bytes;
                f.shared_bytes += u32(atoi(line.c_str() + bracket + 1));
                // A function declares all before it uses any.
                for (const std::string& name : dynamic_shared) symbols[name] = f.dynamic_shared();
            } else if (line.rfind(".maxntid", 0) == 0 || line.rfind(".reqntid", 0) == 0) {
                kernel.most_threads = u32(atoi(line.c_str() + 8));
            } else if (line.back() == ':') {
                labels[line.substr(0, line.size() - 1)] = u32(f.code.size());
            } else if (depth > 0 && line[0] != '.') {
                // Several statements may stand in a line, in a scope of their own.
                std::istringstream parts(line);
                std::string part;
                while (std::getline(parts, part, ';')) {
                    size_t at = part.find_first_not_of(" \t{}");
                    if (line[0] != '{') at = part.find_first_not_of(" \t");
                    if (at == std::string::npos || part[at] == '.') continue;
                    if (!statement(part.substr(at))) return false;
                }
            }
        }
        for (size_t i = 0; i < f.code.size(); i++) {
            if (targets[i].empty()) continue;
            auto label = labels.find(targets[i]);
            if (label == labels.end()) { log = "no label " + targets[i]; return false; }
            f.code[i].target = label->second;
        }
        return true;
    }
};
} // namespace

Code load_ptx(const char* text, Module& module, std::string& log) {
    std::istringstream lines(text);
    std::string line;
    bool is_ptx = false;
    std::vector<std::string> dynamic_shared;
    while (std::getline(lines, line)) {
        is_ptx |= line.rfind(".version", 0) == 0;
        if (line.rfind(".extern .shared", 0) == 0) {
            size_t bracket = line.find("[]"), name = line.find_last_of(" \t", bracket) + 1;
            dynamic_shared.push_back(line.substr(name, bracket - name));
        }
        size_t entry = line.find(".entry ");
        if (entry == std::string::npos) continue;
        auto kernel = std::make_unique<Kernel>();
        kernel->name = line.substr(entry + 7, line.find('(') - entry - 7);
        auto function = std::make_shared<Function>();
        Parser parser{*function, *kernel, log, {}, {}, {}, dynamic_shared, {}};
        if (!parser.body(lines)) return INVALID_PTX;
        kernel->static_shared = function->shared_bytes;
        kernel->run = [function](const Launch& l, void** parameters) { run(*function, l, parameters); };
        std::string name = kernel->name;
        module.kernels[name] = std::move(kernel);
    }
    if (!is_ptx) log = "no .version";
    return is_ptx ? SUCCESS : INVALID_PTX;
}

} // namespace device
