// Which keys a query of an attention sees by their positions, in integers of any size.
//
// To be defined: CAUSAL (0 or 1), whether only keys up to the query; WINDOW, the keys on either side, itself
// counted, or 0 for all.

// Whether a query does not see a key by their positions.
template <class Int> __device__ __forceinline__ bool is_hidden(Int query, Int key) {
    if (CAUSAL && key > query) return true;
    return WINDOW > 0 && (query - key >= WINDOW || (!CAUSAL && key - query >= WINDOW));
}

// Whether some of the queries first..last does not see some of the keys first..last.
template <class Int> __device__ __forceinline__ bool any_hidden(Int query, Int last_query, Int key, Int last_key) {
    if (CAUSAL && last_key > query) return true;
    return WINDOW > 0 && (last_query - key >= WINDOW || (!CAUSAL && last_key - query >= WINDOW));
}

// The first key, and the one after the last, that one of the queries first..last sees.
template <class Int> __device__ __forceinline__ Int first_key(Int query) {
    return WINDOW > 0 && query >= WINDOW ? query - WINDOW + 1 : 0;
}
template <class Int> __device__ __forceinline__ Int end_of_keys(Int last_query, Int keys) {
    Int ahead = CAUSAL ? 1 : WINDOW;
    return ahead > 0 && last_query + ahead < keys ? last_query + ahead : keys;
}

// The first query, and the one after the last, that sees one of the keys first..last.
template <class Int> __device__ __forceinline__ Int first_query(Int key) {
    return CAUSAL ? key : first_key(key);
}
template <class Int> __device__ __forceinline__ Int end_of_queries(Int last_key, Int queries) {
    return WINDOW > 0 && last_key + WINDOW < queries ? last_key + WINDOW : queries;
}
