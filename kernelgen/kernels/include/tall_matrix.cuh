// One matrix for the kernels of tall products. The emitter defines before: STEPS_FIRST (whether the tiles of a step of 16
// along the depth lie together, or the steps of a tile).
extern "C" __global__ void __launch_bounds__(THREADS) equitune_tall_matrix(
    const Real* __restrict__ b, long long by_k, long long by_n, uint4* __restrict__ packed, Real* __restrict__ backs,
    long long depth, long long columns, long long tiles, long long steps) {
    const int tile = blockIdx.x;
    const long long first = STEPS_FIRST ? tile : tile * steps, apart = STEPS_FIRST ? tiles : 1;
    pack_tile(b, by_k, by_n, Real(1), packed, backs, tile, depth, columns, steps, first, apart);
}
