// The hand-written part of a host kernel of a symmetric contraction (after host_vectors.hpp). The emitter defines before
// it: Real, index_t, DIM_IN, DIM_OUT, CHANNELS, WEIGHTS, NODES (of a task) and Rows, pointers to what a node has: rows of
// features, weights and outputs with channels next to each other. Generated text follows: `channels<V>(rows, u)`.
#include <omp.h>

// Features of a node, [CHANNELS, DIM_IN], with channels next to each other, [DIM_IN, CHANNELS], and back.
static inline void by_component(const Real* __restrict__ row, Real* __restrict__ to) {
    for (int i = 0; i < DIM_IN; ++i)
        for (int u = 0; u < CHANNELS; ++u) to[i * CHANNELS + u] = row[u * DIM_IN + i];
}
static inline void by_channel(const Real* __restrict__ from, Real* __restrict__ row) {
    for (int u = 0; u < CHANNELS; ++u)
        for (int i = 0; i < DIM_IN; ++i) row[u * DIM_IN + i] = from[i * CHANNELS + u];
}
// An irrep of D components that begins at component B of an output: [CHANNELS, D] and [D, CHANNELS].
template <int B, int D>
static inline void block_by_component(const Real* __restrict__ row, Real* __restrict__ to) {
    for (int m = 0; m < D; ++m)
        for (int u = 0; u < CHANNELS; ++u) to[(B + m) * CHANNELS + u] = row[B * CHANNELS + u * D + m];
}
template <int B, int D>
static inline void block_by_channel(const Real* __restrict__ from, Real* __restrict__ row) {
    for (int u = 0; u < CHANNELS; ++u)
        for (int m = 0; m < D; ++m) row[B * CHANNELS + u * D + m] = from[(B + m) * CHANNELS + u];
}
