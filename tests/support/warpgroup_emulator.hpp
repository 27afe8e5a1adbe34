// wgmma.mma_async for cuda_emulator.hpp: rows of a warp are its own, so each warp multiplies for itself. Operands in shared
// memory are read as their descriptors say, without swizzle ("Matrix Descriptor Format" and "Strides" in the PTX ISA).
// Sums are not numbers until they are waited for; what is written for tensor cores has to be shown to them.
static void wait_for_warpgroup() { wait_for(arrived_in_group, current / 128 * 128, 128, ~0ull); }
static void meet() { wait_for_warpgroup(); }

static unsigned shared_address(const unsigned short* place) {
    const long long at = (const unsigned char*)place - shared_bytes;
    if (at < 0 || at >= (long long)sizeof shared_bytes || at % 16) { fprintf(stderr, "no address of an operand\n"); abort(); }
    return unsigned(at);
}

// Groups of products that a lane has begun: which of its sums wait for how many groups after them.
struct Unfinished { float* sums; int count; float values[64 * 4]; long long group; };
static Unfinished unfinished[MOST][8];
static long long groups_begun[MOST];
static bool is_open[MOST];  // between a fence and the end of a group
static bool is_shown[MOST];

static void show_to_tensor_cores() { is_shown[current] = true; }

static void begin_products() { is_open[current] = true; }
static void begin_products(unsigned (&)[4], unsigned (&)[4]) { begin_products(); }
static void end_products() {
    if (!is_open[current]) { fprintf(stderr, "a group without a fence\n"); abort(); }
    is_open[current] = false, ++groups_begun[current];
}
template <int LEFT>
static void wait_for_products() {
    for (Unfinished& one : unfinished[current])
        if (one.sums && one.group < groups_begun[current] - LEFT) {
            for (int k = 0; k < one.count; ++k) one.sums[k] = one.values[k];
            one.sums = nullptr;
        }
}
template <int LEFT, int TILES>
static void wait_for(float (&d)[TILES][4]) {
    wait_for_products<LEFT>();
    for (Unfinished& one : unfinished[current])
        if (one.sums == &d[0][0]) { fprintf(stderr, "a wait that leaves its sums unfinished\n"); abort(); }
}

// Element of an operand in shared memory, by its place in what is summed over and in the other dimension: rows of 8 halves
// are along the first, or along the second.
static float of_operand(unsigned long long operand, int summed, int other, bool is_along_other) {
    const int address = int(operand & 0x3fff) << 4, leading = int(operand >> 16 & 0x3fff) << 4;
    const int stride = int(operand >> 32 & 0x3fff) << 4;
    const int row = is_along_other ? summed % 8 : other % 8, place = is_along_other ? other % 8 : summed % 8;
    const int at = address + summed / 8 * leading + other / 8 * stride + row * 16 + place * 2;
    if (operand >> 46 || at + 2 > (int)sizeof shared_bytes) { fprintf(stderr, "an operand outside shared memory\n"); abort(); }
    return half_value(*reinterpret_cast<const unsigned short*>(shared_bytes + at));
}

template <bool ADDS, int TILES, class Left>
static void multiply_rows(float (&d)[TILES][4], Left left, unsigned long long b, bool is_along_other) {
    const int me = current;
    if (!is_open[me]) { fprintf(stderr, "a product without a fence\n"); abort(); }
    Unfinished* mine = nullptr;
    for (Unfinished& one : unfinished[me]) if (one.sums == &d[0][0]) mine = &one;
    for (Unfinished& one : unfinished[me]) if (!mine && !one.sums) mine = &one;
    if (!mine) { fprintf(stderr, "too many products at a time\n"); abort(); }
    const bool is_begun = mine->sums;
    for (int t = 0; t < TILES; ++t) for (int i = 0; i < 4; ++i) {
        const int row = me % 32 / 4 + 8 * (i / 2), column = 8 * t + me % 4 * 2 + i % 2;
        double sum = !ADDS ? 0 : is_begun ? mine->values[4 * t + i] : d[t][i];
        for (int k = 0; k < 16; ++k) sum += double(left(row, k)) * of_operand(b, k, column, is_along_other);
        mine->values[4 * t + i] = float(sum);
        d[t][i] = __builtin_nanf("");
    }
    mine->sums = &d[0][0], mine->count = 4 * TILES, mine->group = groups_begun[me];
}

// Both operands in shared memory, each with rows along what is summed over.
template <bool ADDS, int TILES>
static void multiply_async(float (&d)[TILES][4], unsigned long long a, unsigned long long b) {
    const int first = current / 32 % 4 * 16;
    if (!is_shown[current]) { fprintf(stderr, "an operand that tensor cores do not see\n"); abort(); }
    multiply_rows<ADDS>(d, [=](int row, int k) { return of_operand(a, k, first + row, false); }, b, false);
}
// The left one in registers; rows of the other one across what is summed over.
template <bool ADDS, int TILES>
static void multiply_async(float (&d)[TILES][4], const unsigned (&a)[4], unsigned long long b) {
    const int me = current;
    for (int i = 0; i < 4; ++i) posted[me].u[i] = a[i];
    barrier(ALL);
    auto left = [](int row, int k) {
        return half_of(posted[of_lane(row % 8 * 4 + k % 8 / 2)].u[row / 8 + 2 * (k / 8)], k % 2);
    };
    multiply_rows<ADDS>(d, left, b, true);
    barrier(ALL);
}
