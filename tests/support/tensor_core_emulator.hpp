// The operations of tensor cores for cuda_emulator.hpp: fragments as the PTX ISA lays them out over the 32 lanes of a
// warp (mma.m16n8k16, ldmatrix, movmatrix, "Matrix Fragments"), products exact, sums in double and rounded once. Those of
// four warps (wgmma) are in warpgroup_emulator.hpp.
static float half_value(unsigned bits) {
    union { unsigned u; float f; } both;
    const unsigned exponent = bits >> 10 & 31;
    both.u = (bits & 0x7fff) << 13;
    if (exponent == 31) both.u += (255u - 31) << 23;  // infinity, or no number
    else both.f *= 0x1p112f;  // from one bias of the exponent to the other, subnormal ones too
    return bits >> 15 & 1 ? -both.f : both.f;
}
static unsigned half_bits(float value) {  // rounds to nearest, ties to even
    union { float f; unsigned u; } both;
    both.f = value;
    const unsigned sign = both.u >> 16 & 0x8000;
    const double size = __builtin_fabs(double(value));
    if (size == 0.0) return sign;
    if (size != size) return sign | 0x7e00;
    if (size >= 65520.0) return sign | 0x7c00;
    int exponent = 0;
    __builtin_frexp(size, &exponent);
    const int step = (exponent > -13 ? exponent : -13) - 11;  // of the last place
    const double places = __builtin_nearbyint(__builtin_ldexp(size, -step));
    if (step == -24) return sign | unsigned(places);  // subnormal, or the smallest normal ones
    return sign | (unsigned(step + 24) * 1024 + unsigned(places));
}
static unsigned halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static float low_half(unsigned both) { return half_value(both & 0xffff); }
static float high_half(unsigned both) { return half_value(both >> 16); }

static const unsigned ALL = 0xffffffffu;
static union { unsigned u[8]; const unsigned short* row; } posted[MOST];
static int of_lane(int lane) { return current / 32 * 32 + lane; }

static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const int me = current;
    posted[me].u[0] = value;
    barrier(mask);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) most = posted[of_lane(lane)].u[0] > most ? posted[of_lane(lane)].u[0] : most;
    barrier(mask);
    return most;
}

template <bool TRANSPOSED>
static void load_matrix(const unsigned short* row, unsigned (&r)[4]) {
    if (reinterpret_cast<unsigned long long>(row) % 16) { fprintf(stderr, "ldmatrix of a row off its bounds\n"); abort(); }
    if ((const unsigned char*)row < shared_bytes || (const unsigned char*)(row + 8) > shared_bytes + sizeof shared_bytes) {
        fprintf(stderr, "ldmatrix outside shared memory\n"); abort();
    }
    posted[current].row = row;
    barrier(ALL);
    const int group = current % 32 / 4, quad = current % 4;
    for (int i = 0; i < 4; ++i) {
        unsigned two[2];
        for (int k = 0; k < 2; ++k) {
            const int of_row = TRANSPOSED ? 2 * quad + k : group, column = TRANSPOSED ? group : 2 * quad + k;
            two[k] = posted[of_lane(8 * i + of_row)].row[column];
        }
        r[i] = two[0] | two[1] << 16;
    }
    barrier(ALL);
}

static float half_of(unsigned both, int which) { return which ? high_half(both) : low_half(both); }

static void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const int me = current;
    for (int i = 0; i < 4; ++i) posted[me].u[i] = a[i];
    for (int i = 0; i < 2; ++i) posted[me].u[4 + i] = b[i];
    barrier(ALL);
    const int group = me % 32 / 4, quad = me % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), column = 2 * quad + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            const unsigned of_a = posted[of_lane(row % 8 * 4 + k % 8 / 2)].u[row / 8 + 2 * (k / 8)];
            const unsigned of_b = posted[of_lane(column * 4 + k % 8 / 2)].u[4 + k / 8];
            sum += double(half_of(of_a, k % 2)) * half_of(of_b, k % 2);
        }
        d[i] = float(sum);
    }
    barrier(ALL);
}

static void multiply_add(float (&d)[4], const unsigned (&a)[2], unsigned b) {  // mma.m16n8k8: the other columns of a are zeros
    multiply_add(d, {a[0], a[1], 0u, 0u}, {b, 0u});
}

static unsigned transposed(unsigned both) {
    posted[current].u[0] = both;
    barrier(ALL);
    const int group = current % 32 / 4, quad = current % 4;
    unsigned two[2];
    for (int k = 0; k < 2; ++k) {
        const unsigned from = posted[of_lane((2 * quad + k) * 4 + group / 2)].u[0];
        two[k] = group % 2 ? from >> 16 : from & 0xffff;
    }
    barrier(ALL);
    return two[0] | two[1] << 16;
}
