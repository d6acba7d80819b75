// Keys visible to a query of an attention by position, in integers of any size.
//
// To be defined: CAUSAL (0 or 1), whether only keys up to the query; WINDOW, the keys on either side, counting itself,
// or 0 for all.

// Whether a key is hidden from a query by position.
template <class Int> __device__ __forceinline__ bool is_hidden(Int query, Int key) {
    if (CAUSAL && key > query) return true;
    return WINDOW > 0 && (query - key >= WINDOW || (!CAUSAL && key - query >= WINDOW));
}

// Whether any of the keys first..last is hidden from any of the queries first..last.
template <class Int> __device__ __forceinline__ bool any_hidden(Int query, Int last_query, Int key, Int last_key) {
    if (CAUSAL && last_key > query) return true;
    return WINDOW > 0 && (last_query - key >= WINDOW || (!CAUSAL && last_key - query >= WINDOW));
}

// The first key, and one past the last, visible to any of the queries first..last.
template <class Int> __device__ __forceinline__ Int first_key(Int query) {
    return WINDOW > 0 && query >= WINDOW ? query - WINDOW + 1 : 0;
}
template <class Int> __device__ __forceinline__ Int end_of_keys(Int last_query, Int keys) {
    Int ahead = CAUSAL ? 1 : WINDOW;
    return ahead > 0 && last_query + ahead < keys ? last_query + ahead : keys;
}

// The first query, and one past the last, to which any of the keys first..last is visible.
template <class Int> __device__ __forceinline__ Int first_query(Int key) {
    return CAUSAL ? key : first_key(key);
}
template <class Int> __device__ __forceinline__ Int end_of_queries(Int last_key, Int queries) {
    return WINDOW > 0 && last_key + WINDOW < queries ? last_key + WINDOW : queries;
}
