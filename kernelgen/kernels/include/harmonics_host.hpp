// The hand-written part of a host kernel of spherical harmonics. The emitter defines before it: Real, DIM (elements of a row
// of harmonics) and BLOCK (vectors of a block). STEP is the distance of two components of a vector's row where the
// statements find them.
#define DEVICE static inline __attribute__((always_inline))
constexpr int STEP = BLOCK;

// A square of LANES x LANES elements changes sides in registers: J. O. Eklundh, IEEE Trans. Comput. C-21, 801 (1972).
constexpr int LANES = 32 / sizeof(Real);
typedef Real Lanes __attribute__((vector_size(32)));

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif
template <int S, std::size_t... K>
DEVICE void exchange(Lanes& a, Lanes& b, std::index_sequence<K...>) {
#if __has_builtin(__builtin_shufflevector)
    const Lanes low = __builtin_shufflevector(a, b, (K & S ? LANES + K - S : K)...);
    const Lanes high = __builtin_shufflevector(a, b, (K & S ? LANES + K : K + S)...);
#else
    const Lanes low = {(K & S ? b[K - S * bool(K & S)] : a[K])...};
    const Lanes high = {(K & S ? b[K] : a[K & S ? K : K + S])...};
#endif
    a = low, b = high;
}
template <int S>
DEVICE void exchange_all(Lanes (&row)[LANES]) {
    for (int i = 0; i < LANES; ++i)
        if (!(i & S)) exchange<S>(row[i], row[i + S], std::make_index_sequence<LANES>());
    if constexpr (S > 1) exchange_all<S / 2>(row);
}
DEVICE void turn(const Real* __restrict__ from, int from_stride, Real* __restrict__ to, int to_stride) {
    Lanes row[LANES];
    for (int i = 0; i < LANES; ++i) std::memcpy(&row[i], from + i * from_stride, sizeof(Lanes));
    exchange_all<LANES / 2>(row);
    for (int i = 0; i < LANES; ++i) std::memcpy(to + i * to_stride, &row[i], sizeof(Lanes));
}

// Rows of N elements to columns of BLOCK elements, with zeros where a block has fewer rows, and back. The last square
// of a row overlaps the one before it.
template <int N>
static inline void load_columns(const Real* __restrict__ rows, int count, Real* __restrict__ columns) {
    int i = 0;
    if constexpr (N >= LANES)
        for (; i + LANES <= count; i += LANES)
            for (int c = 0; c < N; c += LANES) {
                const int first = c < N - LANES ? c : N - LANES;
                turn(rows + i * N + first, N, columns + first * BLOCK + i, BLOCK);
            }
    for (; i < count; ++i)
        for (int c = 0; c < N; ++c) columns[c * BLOCK + i] = rows[i * N + c];
    for (; i < BLOCK; ++i)
        for (int c = 0; c < N; ++c) columns[c * BLOCK + i] = Real(0);
}
template <int N>
static inline void store_columns(const Real* __restrict__ columns, int count, Real* __restrict__ rows) {
    int i = 0;
    if constexpr (N >= LANES)
        for (; i + LANES <= count; i += LANES)
            for (int c = 0; c < N; c += LANES) {
                const int first = c < N - LANES ? c : N - LANES;
                turn(columns + first * BLOCK + i, BLOCK, rows + i * N + first, N);
            }
    for (; i < count; ++i)
        for (int c = 0; c < N; ++c) rows[i * N + c] = columns[c * BLOCK + i];
}
