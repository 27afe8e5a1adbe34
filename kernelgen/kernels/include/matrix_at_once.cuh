// A block's part of the matrix in one pass over memory: all loads are in flight at once, and wait in registers for the
// scale. A lane has pairs of a path's matrix, one channel of hidden features k and k + 2, which in shared memory are
// neighbours; lanes with the same k have the channels of one row.
constexpr int PAIRS = (STEPS * 8 * CHANNELS + THREADS - 1) / THREADS;  // of a path, of a lane

// The lane's pairs of a path's channels; zero beyond `inside` and HIDDEN. The first UNIQUE channels may be there again.
template <int UNIQUE = CHANNELS>
DEVICE void fetch_path(const Real* matrix, int weights, int inside, Real (&held)[PAIRS][2]) {
    UNROLL for (int n = 0; n < PAIRS; ++n) UNROLL for (int q = 0; q < 2; ++q) {
        const int i = threadIdx.x + n * THREADS, channel = i % UNIQUE, k = i / (2 * CHANNELS) * 4 + i / CHANNELS % 2 + 2 * q;
        held[n][q] = channel < inside && k < HIDDEN ? matrix[(long long)k * weights + channel] : Real(0);
    }
}
// What `fetch_path` left, times the path's factor; returns the largest magnitude.
DEVICE unsigned take_factor(Real (&held)[PAIRS][2], Real factor) {
    unsigned largest = 0;
    UNROLL for (int n = 0; n < PAIRS; ++n) UNROLL for (int q = 0; q < 2; ++q) {
        held[n][q] *= factor;
        largest = max(largest, magnitude(held[n][q]));
    }
    return largest;
}
// What `fetch_path` left, in shared memory, as by `pack_path`.
DEVICE void leave_path(const Real (&held)[PAIRS][2], Real scale, unsigned short* path) {
    UNROLL for (int n = 0; n < PAIRS; ++n) {
        const int i = threadIdx.x + n * THREADS, channel = i % 16, k = i / 32 * 4 + i / 16 % 2;
        const int row = EDGE_ROWS ? channel : channel / 2 + 8 * (channel % 2);
        unsigned* const place = reinterpret_cast<unsigned*>(path + row * ROW + k / 16 * 16 + k % 16 / 2 + 8 * (k % 2));
        unsigned hi, lo;
        split(held[n][0] * scale, held[n][1] * scale, hi, lo);
        if (STEPS * 128 % THREADS == 0 || i < STEPS * 128) {
            *place = hi;
            if (LOW) place[LOW_PART / 2] = lo;
        }
    }
}
