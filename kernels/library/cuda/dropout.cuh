// Dropout of attention weights: each is kept and multiplied by a factor, or replaced by 0.
//
// To be defined: DROPOUT: NO_DROPOUT; STORED, if a mask says which weights are kept; or DRAWN, if that is drawn as by
// the kernel `random_mask`. Weights are numbered in the order [batch, heads, queries, keys].

#include "philox.cuh"

#define NO_DROPOUT 0
#define STORED 1
#define DRAWN 2

#if DROPOUT == NO_DROPOUT
#define DROPOUT_PARAMETERS(Factor)
#else
// Number of weights, number of the mask, and the limit of words that keep a weight.
struct Drawn {
    i64 weights, id, limit;
};

// `kept` is the mask, or the state of the generator.
#define DROPOUT_PARAMETERS(Factor) , const void* kept, Drawn drawn, Factor keep_factor

#if DROPOUT == STORED
template <class Factor> struct Dropout {
    const u8* mask;
    Factor factor;

    __device__ __forceinline__ Dropout(const void* kept, const Drawn&, Factor factor)
        : mask(reinterpret_cast<const u8*>(kept)), factor(factor) {}

    // The factor of a weight.
    __device__ __forceinline__ Factor of(i64 weight) const { return mask[weight] ? factor : Factor(0); }
    // The factors of a weight and of the next one, if that exists.
    __device__ __forceinline__ void pair(i64 weight, bool both, Factor (&out)[2]) const {
        out[0] = of(weight);
        out[1] = both ? of(weight + 1) : Factor(0);
    }
};
#else
template <class Factor> struct Dropout {
    u64 first, key;
    u32 id;
    i64 limit;
    Factor factor;

    __device__ __forceinline__ Dropout(const void* kept, const Drawn& drawn, Factor factor)
        : id(u32(drawn.id)), limit(drawn.limit), factor(factor) {
        const i64* state = reinterpret_cast<const i64*>(kept);
        first = first_number(state, drawn.weights);
        key = u64(state[0]);
    }

    __device__ __forceinline__ Factor by_word(const Four& words, u32 i) const {
        u32 low = i & 1 ? words.at[1] : words.at[0], high = i & 1 ? words.at[3] : words.at[2];
        return i64(i & 2 ? high : low) < limit ? factor : Factor(0);
    }
    __device__ __forceinline__ Factor of(i64 weight) const {
        u64 number = first + u64(weight);
        return by_word(philox(number / 4, id, key), u32(number % 4));
    }
    __device__ __forceinline__ void pair(i64 weight, bool, Factor (&out)[2]) const {
        u64 number = first + u64(weight);
        u32 i = u32(number % 4);
        Four words = philox(number / 4, id, key);
        out[0] = by_word(words, i);
        out[1] = i == 3 ? of(weight + 1) : by_word(words, i + 1);
    }
};
#endif
#endif
