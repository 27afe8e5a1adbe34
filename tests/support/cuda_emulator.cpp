// What emulated kernels share (see cuda_emulator.hpp): lanes on stacks of their own, tensor cores. Compiled once.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include "cuda_emulator_runtime.hpp"

Dim threadIdx, blockIdx, gridDim, blockDim;
alignas(16) unsigned char shared_bytes[256 * 1024];

namespace emulator {

int WARP = 32, current;
alignas(16) unsigned char slots[MOST][16];
bool must_wait, waited[MOST];

// Lanes change by _longjmp, which unlike swapcontext asks nothing of the system.
static const int STACK = 1 << 18;
static jmp_buf scheduler, lanes[MOST];
static bool started[MOST], finished[MOST];
static long long arrived[MOST], arrived_in_block[MOST], arrived_in_group[MOST];
static int threads_in_block;
static void (*run_kernel)();

__attribute__((noinline)) static void yield() {
    if (!_setjmp(lanes[current])) _longjmp(scheduler, 1);
}

// Waits until all lanes from `first` on whose bit is set (all `count` of them where there is no mask) have come here.
static void wait_at(long long* counts, int first, int count, Mask mask) {
    const long long mine = ++counts[current];
    for (int l = 0; l < count; ++l)
        while ((count > WARP || (mask >> l & 1)) && counts[first + l] < mine) {
            if (finished[first + l]) { fprintf(stderr, "lane %d left before a barrier\n", l); abort(); }
            yield();
        }
}

void barrier(Mask mask) { wait_at(arrived, current / WARP * WARP, WARP, mask); }
void wait_for_block() { wait_at(arrived_in_block, 0, threads_in_block, ~0ull); }
void wait_for_warpgroup() { wait_at(arrived_in_group, current / 128 * 128, 128, ~0ull); }

// A lane of one block after the other.
static void lane_main() {
    for (;;) {
        run_kernel();
        finished[current] = true;
        yield();
    }
}

__attribute__((noinline)) static void resume(char* stack) {
    if (_setjmp(scheduler)) return;
    if (started[current]) _longjmp(lanes[current], 1);
    started[current] = true;
    ucontext_t lane;
    getcontext(&lane);
    lane.uc_stack.ss_sp = stack;
    lane.uc_stack.ss_size = STACK;
    makecontext(&lane, lane_main, 0);
    setcontext(&lane);
}

static void forget_products(int lane);

void run_blocks(void (*kernel)(), int blocks, int threads, int warp) {
    char* stacks = static_cast<char*>(malloc((size_t)threads * STACK));
    run_kernel = kernel, threads_in_block = threads, WARP = warp;
    gridDim.x = blocks, blockDim.x = threads;
    for (int block = 0; block < blocks; ++block) {
        __builtin_memset(shared_bytes, 0xff, sizeof shared_bytes);  // not a number in any format, as a device may leave it
        for (int l = 0; l < threads; ++l) {
            if (block == 0) started[l] = false;
            finished[l] = waited[l] = false, arrived[l] = arrived_in_block[l] = arrived_in_group[l] = 0;
            forget_products(l);
        }
        for (bool busy = true; busy;) {
            busy = false;
            for (current = 0; current < threads; ++current)
                if (!finished[current]) {
                    busy = true;
                    blockIdx.x = block, threadIdx.x = current;
                    resume(stacks + (size_t)current * STACK);
                }
        }
    }
    free(stacks);
}

// The operations of tensor cores: fragments as the PTX ISA lays them out over the 32 lanes of a warp (mma.m16n8k16,
// ldmatrix, movmatrix, "Matrix Fragments"), products exact, sums in double and rounded once.
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
unsigned halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
float low_half(unsigned both) { return half_value(both & 0xffff); }
float high_half(unsigned both) { return half_value(both >> 16); }

static union { unsigned u[8]; const unsigned short* row; } posted[MOST];
static int of_lane(int lane) { return current / 32 * 32 + lane; }

unsigned reduce_max(unsigned mask, unsigned value) {
    const int me = current;
    posted[me].u[0] = value;
    barrier(mask);
    unsigned most = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) most = posted[of_lane(lane)].u[0] > most ? posted[of_lane(lane)].u[0] : most;
    barrier(mask);
    return most;
}

void load_matrix(const unsigned short* row, unsigned (&r)[4], bool is_transposed) {
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
            const int of_row = is_transposed ? 2 * quad + k : group, column = is_transposed ? group : 2 * quad + k;
            two[k] = posted[of_lane(8 * i + of_row)].row[column];
        }
        r[i] = two[0] | two[1] << 16;
    }
    barrier(ALL);
}

static float half_of(unsigned both, int which) { return which ? high_half(both) : low_half(both); }

void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
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

static unsigned bits_of(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
static float float_of(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
// Rounds to 10 bits after the point, ties away from zero (cvt.rna.tf32.f32).
float operand_in_tf32(float value) { return value - value == 0 ? float_of((bits_of(value) + 0x1000) & ~0x1fffu) : value; }

// mma.m16n8k8 of TF32.
void multiply_add_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    const int me = current;
    for (int i = 0; i < 6; ++i) {
        posted[me].u[i] = bits_of(i < 4 ? a[i] : b[i - 4]);
        if (posted[me].u[i] & 0x1fff) { fprintf(stderr, "an operand that is not rounded to TF32\n"); abort(); }
    }
    barrier(ALL);
    const int group = me % 32 / 4, quad = me % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = group + 8 * (i / 2), column = 2 * quad + i % 2;
        double sum = d[i];
        for (int k = 0; k < 8; ++k) {
            const unsigned of_a = posted[of_lane(row % 8 * 4 + k % 4)].u[row / 8 + 2 * (k / 4)];
            const unsigned of_b = posted[of_lane(column * 4 + k % 4)].u[4 + k / 4];
            sum += double(float_of(of_a)) * float_of(of_b);
        }
        d[i] = float(sum);
    }
    barrier(ALL);
}

unsigned transposed(unsigned both) {
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

// wgmma.mma_async: rows of a warp are its own, so each warp multiplies for itself. Operands in shared memory are read as
// their descriptors say, without swizzle ("Matrix Descriptor Format" and "Strides" in the PTX ISA). Sums are not numbers
// until they are waited for; what is written for tensor cores has to be shown to them.
unsigned shared_address(const unsigned short* place) {
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

static void forget_products(int lane) {
    if (groups_begun[lane] || is_open[lane])
        for (Unfinished& one : unfinished[lane]) one.sums = nullptr;
    groups_begun[lane] = 0, is_open[lane] = is_shown[lane] = false;
}

void show_to_tensor_cores() { is_shown[current] = true; }

void begin_products() { is_open[current] = true; }
void end_products() {
    if (!is_open[current]) { fprintf(stderr, "a group without a fence\n"); abort(); }
    is_open[current] = false, ++groups_begun[current];
}
void wait_for_products(int left) {
    for (Unfinished& one : unfinished[current])
        if (one.sums && one.group < groups_begun[current] - left) {
            for (int k = 0; k < one.count; ++k) one.sums[k] = one.values[k];
            one.sums = nullptr;
        }
}
void wait_for_sums(const float* d, int left) {
    wait_for_products(left);
    for (Unfinished& one : unfinished[current])
        if (one.sums == d) { fprintf(stderr, "a wait that leaves its sums unfinished\n"); abort(); }
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

// left: rows of a lane and the eighth after it, by what is summed over.
static void multiply_rows(float* d, int tiles, bool adds, const float (&left)[2][16], unsigned long long b, bool is_along_other) {
    const int me = current;
    if (!is_open[me]) { fprintf(stderr, "a product without a fence\n"); abort(); }
    Unfinished* mine = nullptr;
    for (Unfinished& one : unfinished[me]) if (one.sums == d) mine = &one;
    const bool is_begun = mine;
    for (Unfinished& one : unfinished[me]) if (!mine && !one.sums) mine = &one;
    if (!mine || tiles > 64) { fprintf(stderr, "too many products at a time\n"); abort(); }
    for (int place = 0; place < 4 * tiles; ++place) {
        const int i = place % 4, column = 8 * (place / 4) + me % 4 * 2 + i % 2;
        double sum = !adds ? 0 : is_begun ? mine->values[place] : d[place];
        for (int k = 0; k < 16; ++k) sum += double(left[i / 2][k]) * of_operand(b, k, column, is_along_other);
        mine->values[place] = float(sum);
        d[place] = __builtin_nanf("");
    }
    mine->sums = d, mine->count = 4 * tiles, mine->group = groups_begun[me];
}

// Both operands in shared memory, each with rows along what is summed over.
void multiply_shared(float* d, int tiles, bool adds, unsigned long long a, unsigned long long b) {
    if (!is_shown[current]) { fprintf(stderr, "an operand that tensor cores do not see\n"); abort(); }
    float left[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k)
            left[i][k] = of_operand(a, k, current / 32 % 4 * 16 + current % 32 / 4 + 8 * i, false);
    multiply_rows(d, tiles, adds, left, b, false);
}
// The left one in registers; rows of the other one across what is summed over.
void multiply_registers(float* d, int tiles, bool adds, const unsigned (&a)[4], unsigned long long b) {
    const int me = current;
    for (int i = 0; i < 4; ++i) posted[me].u[i] = a[i];
    barrier(ALL);
    float left[2][16];
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 16; ++k)
            left[i][k] = half_of(posted[of_lane(me % 32 / 4 * 4 + k % 8 / 2)].u[i + 2 * (k / 8)], k % 2);
    multiply_rows(d, tiles, adds, left, b, true);
    barrier(ALL);
}

}  // namespace emulator
