// The value h.
extern "C" __global__ void __launch_bounds__(32 * WARPS) equitune_edge_network_value(
    const Real* __restrict__ x, const uint4* __restrict__ packed, const Real* __restrict__ backs, Real* __restrict__ h,
    long long rows, long long inputs) {
    const long long first = first_row();
    Rows<1> of_edges;
    Rows<STEPS> v, next, slopes;
    load_inputs(x, first, rows, inputs, of_edges);
    multiply(of_edges, packed, backs, v);
    activate(v, slopes);
    for (int layer = 1; layer < LAYERS; ++layer) {
        multiply(v, fragments(packed, layer), scales(backs, layer), next);
        activate(next, slopes);
        copy(next, v);
    }
    store_rows(h, first, rows, v);
}
