// b [depth, columns], in memory b[k * by_k + n * by_n], times a factor, as the kernels of tall products read it: halves,
// high and low, in fragments of the tensor cores. A block has 8 of the columns, a tile; backs are the columns' scales. Two
// neighbouring tiles have 16 neighbouring columns, so that a lane's four results are neighbours; a lane's four elements
// along the depth are neighbours too. Fragment `step` of the tile, of 16 along the depth, is number first + step * apart.
// The emitter defines before: THREADS (a power of two).
DEVICE void pack_tile(const Real* b, long long by_k, long long by_n, Real factor, uint4* packed, Real* backs, int tile,
                      long long depth, long long columns, long long steps, long long first, long long apart) {
    __shared__ unsigned largest[THREADS];
    const int thread = threadIdx.x;
    const auto column_of = [&](int place) { return 16 * (tile / 2) + 4 * (place / 2) + 2 * (tile % 2) + place % 2; };
    // Neighbouring threads have neighbours in memory.
    const int place = by_k < by_n ? thread / (THREADS / 8) : thread % 8;
    const int begin = by_k < by_n ? thread % (THREADS / 8) : thread / 8, mine = column_of(place);
    unsigned most = 0;
    if (mine < columns)
        for (long long k = begin; k < depth; k += THREADS / 8) most = max(most, magnitude(b[k * by_k + mine * by_n] * factor));
    largest[begin * 8 + place] = most;
    __syncthreads();
    for (int half = THREADS / 2; half >= 8; half /= 2) {
        if (thread < half) largest[thread] = max(largest[thread], largest[thread + half]);
        __syncthreads();
    }
    if (thread < 8) backs[column_of(thread)] = scale_of(largest[thread]).back;
    for (long long at = thread; at < steps * 32; at += THREADS) {
        const long long step = at / 32;
        const int in_tile = at % 32 / 4, n = column_of(in_tile);
        const Scale scale = scale_of(largest[in_tile]);
        Real v[4];
        UNROLL for (int i = 0; i < 4; ++i) {
            const long long k = 16 * step + 4 * (at % 4) + i;
            v[i] = k < depth && n < columns ? b[k * by_k + n * by_n] * factor * scale.into : Real(0);
        }
        unsigned hi[2], lo[2];
        split(v[0], v[1], hi[0], lo[0]);
        split(v[2], v[3], hi[1], lo[1]);
        packed[(first + step * apart) * 32 + at % 32] = make_uint4(hi[0], hi[1], lo[0], lo[1]);
    }
}
