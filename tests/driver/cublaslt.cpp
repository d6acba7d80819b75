// A stand-in of cuBLASLt: products are computed one element after the other, in double precision, under the
// restrictions that the library's documentation states. Matrices are in column order.
#include "number.h"
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#define PUBLIC extern "C" __attribute__((visibility("default")))
extern "C" void frit_device_put(void* stream, bool (*work)(void*), void* data);
extern "C" bool frit_device_has(const void* at, size_t bytes);
extern "C" void frit_device_violate(const char* rule);
extern "C" void frit_device_count(const char* what);

namespace {
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type : u32 { F32 = 0, F64 = 1, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };
enum Compute : u32 { COMPUTE_32F = 68, COMPUTE_64F = 70 };
// Bits of what is done beside multiplying.
enum Epilogue : u32 { DEFAULT = 1, BIAS = 4, GELU = 32, AUX = 128, DGELU = 192, BGRAD = 16, BGRADA = 256, BGRADB = 512 };

size_t size_of(u32 type) {
    switch (type) {
    case F64: return 8;
    case F32: return 4;
    case F16: case BF16: return 2;
    case E4M3: case E5M2: return 1;
    default: return 0;
    }
}

double small_float(u8 x, int exponent_bits) {
    int fraction_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = x >> fraction_bits & ((1 << exponent_bits) - 1), fraction = x & ((1 << fraction_bits) - 1);
    double sign = x & 0x80 ? -1 : 1;
    if (exponent_bits == 4 && (x & 0x7f) == 0x7f) return NAN;
    if (exponent_bits == 5 && exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
    return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

double load(const u8* at, u32 type) {
    switch (type) {
    case F64: return read<double>(at);
    case F32: return read<float>(at);
    case F16: return load_f16(at);
    case BF16: return load_bf16(at);
    default: return small_float(*at, type == E4M3 ? 4 : 5);
    }
}
void store(u8* at, u32 type, double x) {
    switch (type) {
    case F64: return write(at, x);
    case F32: return write(at, float(x));
    case F16: return store_f16(at, x);
    default: return store_bf16(at, x);
    }
}
double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
    double t = std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

typedef std::map<int, u64> Attributes;
// Number and size of what may be set.
int set(Attributes& all, const std::map<int, size_t>& known, int attribute, const void* value, size_t size, const char* of) {
    auto found = known.find(attribute);
    if (found == known.end() || found->second != size) {
        frit_device_violate((std::string("attribute ") + std::to_string(attribute) + " of " + of + " with " + std::to_string(size) + " bytes").c_str());
        return INVALID_VALUE;
    }
    u64 bits = 0;
    memcpy(&bits, value, size);
    all[attribute] = bits;
    return SUCCESS;
}
struct Layout {
    u32 type;
    u64 rows, columns;
    int64_t ld;
    Attributes attributes;
    u64 count() const { auto a = attributes.find(5); return a == attributes.end() ? 1 : u64(int(a->second)); }
    u64 stride() const { auto a = attributes.find(6); return a == attributes.end() ? 0 : a->second; }
    size_t extent() const { return ((count() - 1) * stride() + (columns - 1) * u64(ld) + rows) * size_of(type); }
    size_t at(u64 batch, u64 i, u64 j) const { return (batch * stride() + i + j * u64(ld)) * size_of(type); }
};
struct Description {
    u32 compute, scale;
    Attributes attributes;
    u64 get(int attribute, u64 otherwise = 0) const {
        auto a = attributes.find(attribute);
        return a == attributes.end() ? otherwise : a->second;
    }
    bool transposed(int which) const { return get(3 + which) == 1; }
    u32 epilogue() const { return u32(get(7, DEFAULT)); }
    bool has_vector() const { u32 e = epilogue(); return e & (BIAS | BGRAD | BGRADA | BGRADB); }
};
const std::map<int, size_t> DESCRIPTION = {{3, 4}, {4, 4}, {7, 4}, {8, 8}, {11, 8}, {12, 8}, {17, 8}, {18, 8}, {26, 4}};
const std::map<int, size_t> LAYOUT = {{5, 4}, {6, 8}};
const std::map<int, size_t> PREFERENCE = {{1, 8}, {5, 4}, {6, 4}, {7, 4}, {8, 4}};

struct Algorithm { u64 number, alignment[4], rest[3]; };
struct Candidate { Algorithm algorithm; size_t workspace; u32 state; float waves; int reserved[4]; };

// Whether the library has anything for it.
bool is_supported(const Description& d, const Layout& a, const Layout& b, const Layout& c, const u64* alignment) {
    u32 e = d.epilogue();
    bool small = size_of(a.type) == 1;
    if (c.type == F64 && e != DEFAULT) return false;
    if (small != (size_of(b.type) == 1) || (a.type == E5M2 && b.type == E5M2)) return false;
    if (!small && a.type != b.type) return false;
    if (small) {
        // Only with the contracted axis first in both, and in whole blocks of 16 bytes.
        if (!d.transposed(0) || d.transposed(1) || c.type == F64 || !d.get(17) || !d.get(18)) return false;
        for (const Layout* l : {&a, &b, &c}) if (l->rows % 16 || l->ld * size_of(l->type) % 16) return false;
        if (alignment[0] < 16 || alignment[1] < 16 || alignment[3] < 16) return false;
        if (d.has_vector() && d.get(26) != (c.type == F32 ? BF16 : c.type)) return false;
    } else if (d.has_vector() && d.get(26) != c.type) {
        return false;
    }
    if ((e & AUX) && (d.get(12) % 8 != 0 || d.get(12) < c.rows || c.count() != 1)) return false;
    return true;
}

struct Problem {
    Description d;
    Layout a, b, c;
    const u8 *at_a, *at_b;
    u8* at_c;
    double alpha;
    // What is added to the problem, with the layout of the result; null for nothing.
    const u8* addend;
};

bool multiply(void* data) {
    Problem& p = *static_cast<Problem*>(data);
    const Description& d = p.d;
    u64 m = p.c.rows, n = p.c.columns, k = d.transposed(0) ? p.a.rows : p.a.columns;
    u32 e = d.epilogue(), type = p.c.type;
    auto* vector = reinterpret_cast<u8*>(d.get(8));
    auto* aux = reinterpret_cast<u8*>(d.get(11));
    u32 vector_type = u32(d.get(26));
    auto put_vector = [&](u64 i, double x) { store(vector + i * size_of(vector_type), vector_type, x); };
    double scale = p.alpha;
    for (int which : {17, 18})
        if (size_of(p.a.type) == 1) scale *= read<float>(reinterpret_cast<const void*>(d.get(which)));
    std::vector<double> a(m * k), b(k * n), rows(m), sum_a(m), sum_b(n);
    for (u64 batch = 0; batch < p.c.count(); batch++) {
        for (u64 i = 0; i < m; i++)
            for (u64 l = 0; l < k; l++)
                a[i * k + l] = load(p.at_a + (d.transposed(0) ? p.a.at(batch, l, i) : p.a.at(batch, i, l)), p.a.type);
        for (u64 j = 0; j < n; j++)
            for (u64 l = 0; l < k; l++)
                b[j * k + l] = load(p.at_b + (d.transposed(1) ? p.b.at(batch, j, l) : p.b.at(batch, l, j)), p.b.type);
        for (u64 j = 0; j < n; j++) {
            for (u64 i = 0; i < m; i++) {
                double x = 0;
                for (u64 l = 0; l < k; l++) x += a[i * k + l] * b[j * k + l];
                x *= scale;
                if (p.addend) x += load(p.addend + p.c.at(batch, i, j), type);
                if ((e & BIAS) && e < BGRADA) x += load(vector + i * size_of(vector_type), vector_type);
                u8* beside = aux + (i + j * d.get(12)) * size_of(type);
                if ((e & DGELU) == DGELU) x *= gelu_slope(load(beside, type));
                else if (e & GELU) {
                    if (e & AUX) store(beside, type, x);
                    x = gelu(x);
                }
                if ((e & BGRAD) && (e & DGELU) == DGELU) rows[i] += x;
                store(p.at_c + p.c.at(batch, i, j), type, x);
            }
        }
    }
    if ((e & BGRAD) && (e & DGELU) == DGELU) for (u64 i = 0; i < m; i++) put_vector(i, rows[i]);
    if (e & BGRADA) for (u64 i = 0; i < m; i++) { double x = 0; for (u64 l = 0; l < k; l++) x += a[i * k + l]; put_vector(i, x); }
    if (e & BGRADB) for (u64 j = 0; j < n; j++) { double x = 0; for (u64 l = 0; l < k; l++) x += b[j * k + l]; put_vector(j, x); }
    return true;
}
int handle;
} // namespace

PUBLIC size_t cublasLtGetVersion() { return 120000; }
PUBLIC const char* cublasLtGetStatusString(int code) {
    return code == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : code == INVALID_VALUE ? "CUBLAS_STATUS_INVALID_VALUE" : "CUBLAS_STATUS";
}
PUBLIC int cublasLtCreate(void** made) { *made = &handle; return SUCCESS; }
PUBLIC int cublasLtMatmulDescCreate(Description** made, u32 compute, u32 scale) {
    bool known = (compute == COMPUTE_32F && scale == F32) || (compute == COMPUTE_64F && scale == F64);
    if (known) *made = new Description{compute, scale, {}};
    return known ? SUCCESS : NOT_SUPPORTED;
}
PUBLIC int cublasLtMatmulDescSetAttribute(Description* d, int attribute, const void* value, size_t size) {
    return set(d->attributes, DESCRIPTION, attribute, value, size, "a description");
}
PUBLIC int cublasLtMatrixLayoutCreate(Layout** made, u32 type, u64 rows, u64 columns, int64_t ld) {
    if (size_of(type) == 0 || rows == 0 || columns == 0 || ld < int64_t(rows)) return INVALID_VALUE;
    *made = new Layout{type, rows, columns, ld, {}};
    return SUCCESS;
}
PUBLIC int cublasLtMatrixLayoutSetAttribute(Layout* l, int attribute, const void* value, size_t size) {
    return set(l->attributes, LAYOUT, attribute, value, size, "a layout");
}
PUBLIC int cublasLtMatmulPreferenceCreate(Attributes** made) { *made = new Attributes; return SUCCESS; }
PUBLIC int cublasLtMatmulPreferenceSetAttribute(Attributes* p, int attribute, const void* value, size_t size) {
    return set(*p, PREFERENCE, attribute, value, size, "a preference");
}
PUBLIC int cublasLtMatmulPreferenceDestroy(Attributes* p) { delete p; return SUCCESS; }
PUBLIC int cublasLtMatmulAlgoGetHeuristic(void*, Description* d, Layout* a, Layout* b, Layout* c, Layout*, Attributes* p, int n, Candidate* out, int* found) {
    u64 alignment[4] = {(*p)[5], (*p)[6], (*p)[7], (*p)[8]};
    *found = 0;
    frit_device_count(("heuristics of " + std::to_string(n)).c_str());
    if (!is_supported(*d, *a, *b, *c, alignment)) return NOT_SUPPORTED;
    for (u64 i = 0; i < 2 && int(i) < n; i++) {
        out[i] = {{i + 1, {alignment[0], alignment[1], alignment[2], alignment[3]}, {}}, i << 20, 0, 1.0f, {}};
        *found += 1;
    }
    return SUCCESS;
}
PUBLIC int cublasLtMatmul(void*, Description* d, const void* alpha, const void* at_a, Layout* a, const void* at_b, Layout* b, const void* beta,
                          const void* at_addend, Layout* addend, void* at_c, Layout* c, const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
    bool wide = d->compute == COMPUTE_64F;
    double scale = wide ? read<double>(alpha) : read<float>(alpha), add = wide ? read<double>(beta) : read<float>(beta);
    // What an epilogue reads and writes is as aligned as the result.
    const u64 addresses[6] = {u64(at_a), u64(at_b), u64(at_addend), u64(at_c), d->has_vector() ? d->get(8) : 0, d->epilogue() & AUX ? d->get(11) : 0};
    for (int i = 0; i < 6; i++) {
        if (addresses[i] % algorithm->alignment[i < 4 ? i : 3] != 0) {
            frit_device_violate("cublasLtMatmul of an operand that is less aligned than was said");
            return INVALID_VALUE;
        }
    }
    u64 m = c->rows, n = c->columns;
    bool inside = frit_device_has(at_a, a->extent()) && frit_device_has(at_b, b->extent()) && frit_device_has(at_c, c->extent());
    size_t length = d->epilogue() & BGRADB ? n : m;
    if (d->has_vector()) inside = inside && frit_device_has(reinterpret_cast<void*>(d->get(8)), length * size_of(u32(d->get(26))));
    if (d->epilogue() & AUX) inside = inside && frit_device_has(reinterpret_cast<void*>(d->get(11)), ((n - 1) * d->get(12) + m) * size_of(c->type));
    size_t needed = size_t(algorithm->number - 1) << 20;
    inside = inside && addend == c && (add == 0 || (add == 1 && frit_device_has(at_addend, c->extent())));
    if (!inside || bytes < needed || !frit_device_has(workspace, needed) || uintptr_t(workspace) % 256 != 0) {
        frit_device_violate("cublasLtMatmul outside of an allocation, or with too little workspace");
        return INVALID_VALUE;
    }
    auto* problem = new Problem{*d, *a, *b, *c, static_cast<const u8*>(at_a), static_cast<const u8*>(at_b), static_cast<u8*>(at_c), scale, add == 0 ? nullptr : static_cast<const u8*>(at_addend)};
    frit_device_put(stream, multiply, problem);
    return SUCCESS;
}
