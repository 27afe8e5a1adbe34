// The matrices of a radial network times their factors, for its kernels: as they are, and transposed if `turned` is not
// null. A block has a tile of one of them. The emitter defines before: STEPS, LAYERS.
extern "C" __global__ void __launch_bounds__(THREADS) equitune_edge_matrices(
    const Real* __restrict__ m0, const Real* __restrict__ m1, const Real* __restrict__ m2, long long f0, long long f1,
    long long f2, uint4* __restrict__ packed, Real* __restrict__ backs, uint4* __restrict__ turned,
    Real* __restrict__ turned_backs, long long inputs) {
    constexpr int TILES = 2 * STEPS, HIDDEN = 16 * STEPS;
    const bool is_turned = blockIdx.x >= LAYERS * TILES;
    const int at = is_turned ? blockIdx.x - LAYERS * TILES : blockIdx.x;
    // The first matrix has few inputs: transposed it has two tiles.
    const int of_first = is_turned ? 2 : TILES;
    const int layer = at < of_first ? 0 : 1 + (at - of_first) / TILES, tile = layer ? (at - of_first) % TILES : at;
    const Real* const matrix = layer == 0 ? m0 : layer == 1 ? m1 : m2;
    const Real factor = Real(__longlong_as_double(layer == 0 ? f0 : layer == 1 ? f1 : f2));
    const long long from = layer ? HIDDEN : inputs;
    const long long depth = is_turned ? HIDDEN : from, columns = is_turned ? from : HIDDEN, steps = (depth + 15) / 16;
    pack_tile(matrix, is_turned ? 1 : HIDDEN, is_turned ? HIDDEN : 1, factor, fragments(is_turned ? turned : packed, layer),
              scales(is_turned ? turned_backs : backs, layer), tile, depth, columns, steps, tile * steps, 1);
}
