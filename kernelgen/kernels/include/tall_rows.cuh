// What the kernels of tall products share: rows of a, four neighbouring elements a lane, and copies of the other matrix
// to shared memory. A warp has 16 MORE rows; a lane has group = lane / 4 and quad = lane % 4, and rows group and
// group + 8 of each 16. The emitter defines before: MORE, WARPS.
constexpr int ROWS = 16 * MORE;

// High and low parts of a lane's elements of 16 rows along 16 of the depth: left operands of products.
struct Part {
    unsigned hi[4], lo[4];
};

// Four elements of a row from k on; beyond the depth others of the row, which meet zeros.
DEVICE void load_four(const Real* row, long long k, long long depth, Real (&v)[4]) { load<4>(row + (k < depth ? k : 0), v); }

// Row number `half` (0: group, 1: group + 8) of a part.
DEVICE void put_part(const Real (&v)[4], Real into, int half, Part& part) {
    split(v[0] * into, v[1] * into, part.hi[half], part.lo[half]);
    split(v[2] * into, v[3] * into, part.hi[half + 2], part.lo[half + 2]);
}

// The scale of a row (or of a column) whose four lanes have their largest magnitudes.
DEVICE Scale scale_of_row(unsigned largest) {
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    return scale_of(largest);
}

// d += part b without the products of low parts; small sums first, and the chain in the tensor cores is short.
template <int N>
DEVICE void multiply_parts(const Part (&part)[N], const uint4 (&b)[N], Real (&d)[4]) {
    UNROLL for (int s = 0; s < N; ++s) {
        const unsigned hi[2] = {b[s].x, b[s].y}, lo[2] = {b[s].z, b[s].w};
        multiply_add(d, part[s].lo, hi);
        multiply_add(d, part[s].hi, lo);
    }
    UNROLL for (int s = 0; s < N; ++s) {
        const unsigned hi[2] = {b[s].x, b[s].y};
        multiply_add(d, part[s].hi, hi);
    }
}

// COUNT pieces of 16 bytes, from number `first` of `all` on, by all threads of a block, without waiting.
template <int COUNT>
DEVICE void fetch(void* to, const void* from, long long first, long long all) {
    for (int i = threadIdx.x; i < COUNT; i += 32 * WARPS)
        if (first + i < all)
            fetch16(static_cast<Real*>(to) + 4 * i, static_cast<const Real*>(from) + 4 * (first + i));
}
