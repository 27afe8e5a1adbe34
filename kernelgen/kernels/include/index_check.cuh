// Indices of edges, checked on the device: what is out of range, or not ascending where that was promised, stops the
// program with a device-side assertion, as torch's own indexing does. INDEX is the type of an index.
extern "C" __device__ void __assertfail(
    const char* message, const char* file, unsigned line, const char* function, size_t char_size);

extern "C" __global__ void __launch_bounds__(256) equitune_index_check(
    const INDEX* index, long long edges, long long count, unsigned long long is_receiver, unsigned long long ascending) {
    const long long step = 256ll * gridDim.x;
    for (long long edge = blockIdx.x * 256ll + threadIdx.x; edge < edges; edge += step) {
        const long long node = index[edge];
        if (ascending) {
            if (edge > 0 && index[edge - 1] > node)
                __assertfail("receiver is ascending, as edges_sorted promises", "equitune", 0, "conv", 1);
        } else if (node < 0 || node >= count) {
            if (is_receiver)
                __assertfail("0 <= receiver[edge] < num_out", "equitune", 0, "conv", 1);
            else
                __assertfail("0 <= sender[edge] < num_in", "equitune", 0, "conv", 1);
        }
    }
}
