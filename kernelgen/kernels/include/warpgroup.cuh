// Products of four warps at a time, a warpgroup: wgmma.mma_async of halves with sums in float32, which compute capability
// 9.0 alone has. Each warp has 16 of the 64 rows, in fragments as of mma.m16n8k16; all have the same columns. Of gradients
// rows are edges, each warp's own, and columns channels; of a value rows are channels, and columns edges. Products run
// while lanes go on: until `wait_for` nobody may touch sums, or the registers of a left operand. The emitter defines
// `multiply_async` and `wait_for` for each width.
//
// Operands in shared memory are blocks of 8 rows by 8 halves, 128 bytes in a row. Rows of the matrix are channels of a
// path, columns hidden features in the order of rows of edges (see radial.cuh). Read along its rows the matrix gives
// weights, read across them gradients of hidden features.
constexpr int BLOCK = 64;                              // halves of a block
// Halves of hidden features of a warpgroup's 64 edges, or a value's staged ones; low parts are behind.
constexpr int HIDDEN_PART = (EDGE_ROWS ? 64 : STAGE) / 8 * 2 * STEPS * BLOCK;
constexpr int HIDDEN_ROWS = HIDDEN_PART * (LOW ? 2 : 1);

#ifdef __CUDA_ARCH__
DEVICE unsigned shared_address(const unsigned short* place) { return unsigned(__cvta_generic_to_shared(place)); }
// The four warps wait for each other.
DEVICE void meet() { asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory"); }
// What this thread wrote to shared memory is what tensor cores read there, after the next barrier.
DEVICE void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;"); }
// Also of a left operand in registers.
DEVICE void begin_products(unsigned (&hi)[4], unsigned (&lo)[4]) {
    if (LOW)
        asm volatile("wgmma.fence.sync.aligned;"
            : "+r"(hi[0]), "+r"(hi[1]), "+r"(hi[2]), "+r"(hi[3]), "+r"(lo[0]), "+r"(lo[1]), "+r"(lo[2]), "+r"(lo[3]));
    else
        asm volatile("wgmma.fence.sync.aligned;" : "+r"(hi[0]), "+r"(hi[1]), "+r"(hi[2]), "+r"(hi[3]));
}
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;"); }
// Until all but the last LEFT groups of products are done.
template <int LEFT>
DEVICE void wait_for_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT)); }
#endif

// An operand in shared memory. Bytes between blocks: `along_sums` of the two that a product sums over, `along_others` of
// rows of the left operand, or of columns of the right one.
DEVICE unsigned long long operand_at(const unsigned short* place, int along_sums, int along_others) {
    const unsigned long long address = shared_address(place) >> 4;
    return address | (unsigned long long)(along_sums >> 4) << 16 | (unsigned long long)(along_others >> 4) << 32;
}
// So many halves further.
DEVICE unsigned long long further(unsigned long long operand, int halves) { return operand + halves / 8; }

// Where a channel's row of a path's part has a hidden feature; `left_path` and `pack_path` do the same without blocks.
DEVICE int place_in_blocks(int channel, int k) {
    const int row = EDGE_ROWS ? channel : channel / 16 * 16 + channel % 16 / 2 + 8 * (channel % 2);
    const int column = k / 16 * 16 + k % 16 / 2 + 8 * (k % 2);
    return row / 8 * (8 * ROW) + column / 8 * BLOCK + row % 8 * 8 + column % 8;
}
DEVICE void pack_blocks(const Real* matrix, int weights, int inside, Real factor, Real scale, unsigned short* path) {
    for (int i = threadIdx.x; i < STEPS * 16 * CHANNELS; i += THREADS) {
        const int channel = i % CHANNELS, k = i / CHANNELS;
        const bool is_there = channel < inside && k < HIDDEN;
        const Real value = is_there ? matrix[(long long)k * weights + channel] * factor * scale : Real(0);
        unsigned short* const place = path + place_in_blocks(channel, k);
        unsigned hi, lo;
        split(value, Real(0), hi, lo);
        place[0] = (unsigned short)(hi & 0xffffu);
        if (LOW) place[LOW_PART] = (unsigned short)(lo & 0xffffu);
    }
}
// What `fetch_path` left, N pairs.
template <int N>
DEVICE void leave_blocks(const Real (&held)[N][2], Real scale, unsigned short* path) {
    UNROLL for (int n = 0; n < N; ++n) {
        const int i = threadIdx.x + n * THREADS, channel = i % CHANNELS, k = i / (2 * CHANNELS) * 4 + i / CHANNELS % 2;
        unsigned* const place = reinterpret_cast<unsigned*>(path + place_in_blocks(channel, k));
        unsigned hi, lo;
        split(held[n][0] * scale, held[n][1] * scale, hi, lo);
        if (STEPS * 8 * CHANNELS % THREADS == 0 || i < STEPS * 8 * CHANNELS) {
            *place = hi;
            if (LOW) place[LOW_PART / 2] = lo;
        }
    }
}

// Hidden features of 8 edges to shared memory, as the eight rows or columns number `octet` of an operand.
DEVICE void leave_octet(const Warp& warp, int octet, const unsigned (&hi)[STEPS][2], const unsigned (&lo)[STEPS][2],
                        unsigned short* hidden) {
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int k = 0; k < 2; ++k) {
        const int block = octet * 2 * STEPS + 2 * s + k;
        unsigned* const place = reinterpret_cast<unsigned*>(hidden + block * BLOCK + warp.group * 8 + warp.quad * 2);
        *place = hi[s][k];
        if (LOW) place[HIDDEN_PART / 2] = lo[s][k];
    }
}
// Those of a warp's 16 edges, as the left operand of products; `left` is the warpgroup's.
DEVICE void leave_hidden(const Warp& warp, const unsigned (&hi)[2][STEPS][2], const unsigned (&lo)[2][STEPS][2],
                         unsigned short* left) {
    meet();  // products of the edges before have read theirs
    UNROLL for (int i = 0; i < 2; ++i) leave_octet(warp, threadIdx.x / 32 % 4 * 2 + i, hi[i], lo[i], left);
    show_to_tensor_cores();
    meet();
}

// Begins to form products of two operands with hidden features along their rows; so many halves behind each are its low
// parts. Small products come first.
template <int COUNT>
DEVICE void begin_weights(unsigned long long left, int left_low, unsigned long long right, int right_low,
                          Real (&w)[COUNT][4]) {
    constexpr int STEP = 2 * BLOCK;
    begin_products();
    if (LOW) {
        multiply_async<false>(w, further(left, left_low), right);
        UNROLL for (int s = 1; s < STEPS; ++s) multiply_async<true>(w, further(left, left_low + STEP * s), further(right, STEP * s));
        UNROLL for (int s = 0; s < STEPS; ++s) multiply_async<true>(w, further(left, STEP * s), further(right, right_low + STEP * s));
    }
    multiply_async<LOW>(w, left, right);
    UNROLL for (int s = 1; s < STEPS; ++s) multiply_async<true>(w, further(left, STEP * s), further(right, STEP * s));
    end_products();
}
// Begins to form weights of COUNT paths, of each 16 edges and 8 channels: {edge g: c0 c1, edge g + 8: c0 c1}.
template <int COUNT>
DEVICE void begin_edge_weights(const unsigned short* hidden, const unsigned short* matrix, Real (&w)[COUNT][4]) {
    const unsigned long long right = operand_at(matrix, 2 * BLOCK, 2 * PATH);
    begin_weights(operand_at(hidden, 2 * BLOCK, 4 * STEPS * BLOCK), HIDDEN_PART, right, LOW_PART, w);
}
// The edge at the lane's place of those from one on; the last one of all behind it.
template <class Buffers>
DEVICE int edge_at(const Buffers& b, const Warp& warp, int first, int end) {
    const int place = min(first + warp.lane, max(end - 1, 0));
    return b.perm ? b.perm[place] : place;
}
// Begins to form weights of a path, of T tiles of 8 edges and 16 channels of each warp, as `form_weights` does.
template <int T>
DEVICE void begin_channel_weights(const unsigned short* hidden, const unsigned short* matrix, Real (&w)[T][4]) {
    const unsigned long long left = operand_at(matrix, 2 * BLOCK, 4 * STEPS * BLOCK);
    begin_weights(left, LOW_PART, operand_at(hidden, 2 * BLOCK, 4 * STEPS * BLOCK), HIDDEN_PART, w);
}

// Begins to add what gradients of weights of two paths give for hidden features; of one path, if its second part is zero.
// ADDS: to a chain of sums that has begun.
template <bool IS_TWO, bool ADDS>
DEVICE void begin_hidden(const unsigned short* matrix, unsigned (&hi)[4], unsigned (&lo)[4], Real (&d)[2 * STEPS][4]) {
    const unsigned long long m = operand_at(matrix, IS_TWO ? 2 * PATH : 0, 2 * BLOCK);
    begin_products(hi, lo);
    if (LOW) {
        multiply_async<ADDS>(d, lo, m);
        multiply_async<true>(d, hi, further(m, LOW_PART));
    }
    multiply_async<ADDS || LOW>(d, hi, m);
    end_products();
}
// The tiles of weights of one of COPIES of the same channels.
template <int COPIES, int T>
DEVICE void choose_tiles(int copy, const Real (&all)[T][4], Real (&w)[T / COPIES][4]) {
    UNROLL for (int n = 0; n < T / COPIES; ++n) UNROLL for (int k = 0; k < 4; ++k) {
        w[n][k] = all[n][k];
        UNROLL for (int c = 1; c < COPIES; ++c) w[n][k] = copy == c ? all[c * (T / COPIES) + n][k] : w[n][k];
    }
}

// Adds a chain of sums to the gradients of hidden features.
DEVICE void end_hidden(const Real (&d)[2 * STEPS][4], const Scale (&scale)[2], Real (&dh)[2][STEPS][4]) {
    UNROLL for (int s = 0; s < STEPS; ++s) UNROLL for (int i = 0; i < 2; ++i) UNROLL for (int q = 0; q < 4; ++q)
        dh[i][s][q] += d[2 * s + q % 2][2 * i + q / 2] * scale[i].back;
}

// The lower one of a row's scale and another; returns what sums that have the row's scale are multiplied by.
DEVICE Real lower(Scale& scale, const Scale& other) {
    const bool is_lower = other.into < scale.into;
    const Real factor = is_lower ? other.into * scale.back : Real(1);
    scale = is_lower ? other : scale;
    return factor;
}
DEVICE void multiply_rows(const Real (&factor)[2], Real (&d)[2 * STEPS][4]) {
    if (!__ballot_sync(0xffffffffu, factor[0] != Real(1) || factor[1] != Real(1))) return;
    UNROLL for (int t = 0; t < 2 * STEPS; ++t) UNROLL for (int k = 0; k < 4; ++k) d[t][k] *= factor[k / 2];
}

// A warp's share of a block's edges, first .. end - 1, in steps of 16 edges of a receiver, from a run on; `rounds` is how
// many steps the warp with the most has. All warps of a block go so many rounds, because they multiply together.
struct Steps {
    int run, first, end, count, rounds;
};
// The place before which there are `step` steps, in the order of edges, among a block's edges first .. end - 1, which
// begin with a run: {run, edge, steps before it}. Beyond the last step it has the number of all steps.
struct StepPlace {
    int run, edge, before;
};
DEVICE StepPlace place_of_step(const Warp& warp, const int* spans, int num_out, int run, int first, int end, int step) {
    int before = 0;
    for (int at = run; at < num_out; at += 32) {
        const int mine = min(at + warp.lane, num_out - 1);
        const int begin = max(spans[3 * mine + 1], first), edges = min(spans[3 * mine + 2], end) - begin;
        const int steps = at + warp.lane < num_out && edges > 0 ? (edges + 15) / 16 : 0;
        int behind = steps;  // of this lane's run and those before
        UNROLL for (int d = 1; d < 32; d *= 2) {
            const int other = warp.broadcast(behind, max(warp.lane - d, 0));
            if (warp.lane >= d) behind += other;
        }
        const unsigned found = __ballot_sync(0xffffffffu, before + behind > step);
        if (found) {
            const int from = __ffs(found) - 1;
            const int edge = begin + 16 * (step - before - behind + steps);
            return {at + from, warp.broadcast(edge, from), step};
        }
        before += warp.broadcast(behind, 31);
        if (warp.broadcast(begin, 31) >= end) break;
    }
    return {num_out, end, before};
}
DEVICE Steps steps_of_warp(const Warp& warp, const int* spans, int num_out, int run, int first, int end) {
    constexpr int WARPS = THREADS / 32;
    const int number = warp.broadcast(threadIdx.x / 32, 0);
    const int all = place_of_step(warp, spans, num_out, run, first, end, 0x7fffffff).before;
    const int from = int((long long)all * number / WARPS), to = int((long long)all * (number + 1) / WARPS);
    const StepPlace begin = place_of_step(warp, spans, num_out, run, first, end, from);
    const StepPlace behind = place_of_step(warp, spans, num_out, run, first, end, to);
    return {begin.run, begin.edge, behind.edge, to - from, (all + WARPS - 1) / WARPS};
}

// What a warp of gradients knows of its steps, in shared memory: its registers are for products, and spilled ones are
// slower to read. All lanes write the same. The share's edges and steps, the receiver that is staged: its number, the
// first of its edges that are there, the end of all, and how many are there; numbers and senders of these.
struct Walk {
    int first, end, count, rounds, run, base, behind, staged;
    Real node_back, matrix_scale;
    int unused[2];
    int edge[STAGE], far[STAGE];
};
DEVICE void begin_walk(volatile Walk& walk, const Steps& share, Real matrix_scale) {
    walk.first = share.first, walk.end = share.end, walk.count = share.count, walk.rounds = share.rounds;
    walk.run = share.run - 1, walk.base = 1, walk.behind = 1, walk.staged = 0;
    walk.node_back = Real(0), walk.matrix_scale = matrix_scale;
}
