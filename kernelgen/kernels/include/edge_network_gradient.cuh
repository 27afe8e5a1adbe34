// The gradient of x for cotangents g of h; features are computed again. turned: the transposed matrices.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_edge_network_gradient(
    const Real* __restrict__ x, const Real* __restrict__ g, const uint4* __restrict__ packed,
    const Real* __restrict__ backs, const uint4* __restrict__ turned, const Real* __restrict__ turned_backs,
    Real* __restrict__ of_x, long long rows, long long inputs) {
    const long long first = first_row();
    Rows<1> of_edges;
    Rows<STEPS> slopes[LAYERS], v, next;
    load_inputs(x, first, rows, inputs, of_edges);
    multiply(of_edges, packed, backs, v);
    activate(v, slopes[0]);
    UNROLL for (int layer = 1; layer < LAYERS; ++layer) {
        multiply(v, fragments(packed, layer), scales(backs, layer), next);
        activate(next, slopes[layer]);
        copy(next, v);
    }
    load_rows(g, first, rows, v);
    UNROLL for (int layer = LAYERS - 1; layer > 0; --layer) {
        scale_by(slopes[layer], v);
        multiply(v, fragments(turned, layer), scales(turned_backs, layer), next);
        copy(next, v);
    }
    scale_by(slopes[0], v);
    multiply(v, turned, turned_backs, of_edges);
    store_inputs(of_x, first, rows, inputs, of_edges);
}
