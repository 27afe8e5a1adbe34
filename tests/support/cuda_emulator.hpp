// Runs generated CUDA text on the host, lane by lane: each lane of a block is a coroutine that yields at exchanges of
// its warp and at barriers of its block. Slow and exact; it tests indexing, exchanges and who-writes-what where there is no GPU.
// With HIP_WAVE the text is of the HIP form for waves of so many lanes: exchanges of a wave are those of its header.
// Small headers only: parsing the standard library's would take as long as compiling the kernel.
// What no text changes is in cuda_emulator.cpp, which is compiled once, with optimisation.
#include <stdio.h>
#include <stdlib.h>

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#ifdef KERNEL_CALL  // of a hand-written kernel, whose shared memory is static
#define __shared__ static
#else
#define __shared__
#endif
#define __align__(n) __attribute__((aligned(n)))
template <class T>
static T min(T a, T b) { return b < a ? b : a; }
template <class T>
static T max(T a, T b) { return a < b ? b : a; }
static inline float sqrt(float x) { return __builtin_sqrtf(x); }
static inline double sqrt(double x) { return __builtin_sqrt(x); }
static inline double __longlong_as_double(long long bits) {
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float exp(float x) { return __builtin_expf(x); }
static inline double exp(double x) { return __builtin_exp(x); }
static inline float pow(float x, float y) { return __builtin_powf(x, y); }
static inline double pow(double x, double y) { return __builtin_pow(x, y); }
static inline float tanh(float x) { return __builtin_tanhf(x); }
static inline double tanh(double x) { return __builtin_tanh(x); }

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#include "cuda_emulator_runtime.hpp"
using namespace emulator;

#ifndef HIP_WAVE
#define HIP_WAVE 32
#define IS_CUDA 1
#endif
static void __syncthreads() { wait_for_block(); }

template <class T>
static T exchange(Mask mask, T value, int from) {
    if (!(mask >> current % WARP & 1) || !(mask >> from % WARP & 1)) { fprintf(stderr, "exchange outside its mask\n"); abort(); }
    const int me = current;
    *reinterpret_cast<T*>(slots[me]) = value;
    barrier(mask);
    const T result = *reinterpret_cast<T*>(slots[from]);
    barrier(mask);
    return result;
}

#ifdef IS_CUDA
static void __syncwarp(unsigned mask) { barrier(mask); }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(bits); }
static unsigned __ballot_sync(unsigned mask, bool is_set) {
    const int me = current;
    slots[me][0] = is_set;
    barrier(mask);
    unsigned found = 0;
    for (int l = 0; l < 32; ++l) found |= unsigned(mask >> l & 1 && slots[me / 32 * 32 + l][0]) << l;
    barrier(mask);
    return found;
}
template <class T>
static T __shfl_sync(unsigned mask, T value, int from, int width) {
    return exchange(mask, value, current / width * width + from % width);
}
template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int bit) {
    return exchange(mask, value, current ^ bit);
}
#else
static void wave_barrier(Mask mask) { barrier(mask); }
template <class T>
static T lane_value(Mask mask, T value, int lane) {
    return exchange(mask, value, current / WARP * WARP + lane);
}
#endif

// The zeros of a kernel that writes them itself: by its first blocks, which here run first.
static void await_zeros(const unsigned long long* ready, unsigned long long launch) {
    if (*ready != launch) { fprintf(stderr, "a wait that would not end\n"); abort(); }
    waited[current] = true;
}
static unsigned atomicInc(unsigned* p, unsigned last) {
    const unsigned old = *p;
    *p = old >= last ? 0 : old + 1;
    return old;
}

template <class T>
static T atomicAdd(T* p, T value) {
    if (must_wait && !waited[current]) { fprintf(stderr, "a sum before its zeros\n"); abort(); }
    T old = *p;
    *p += value;
    return old;
}

#define equitune_contraction equitune_kernel  // some kinds have a name of their own
#define equitune_radial equitune_kernel
#ifdef TENSOR_CORES
static unsigned __reduce_max_sync(unsigned mask, unsigned value) { return reduce_max(mask, value); }
template <bool TRANSPOSED>
static void load_matrix(const unsigned short* row, unsigned (&r)[4]) { emulator::load_matrix(row, r, TRANSPOSED); }
static void multiply_add(float (&d)[4], const unsigned (&a)[2], unsigned b) {  // mma.m16n8k8: the other columns of a are zeros
    multiply_add(d, {a[0], a[1], 0u, 0u}, {b, 0u});
}
#endif
#ifdef IN_TF32
static float operand(float value) { return operand_in_tf32(value); }
#endif
#ifdef WARPGROUPS
static void meet() { wait_for_warpgroup(); }
static void begin_products(unsigned (&)[4], unsigned (&)[4]) { begin_products(); }
template <int LEFT>
static void wait_for_products() { wait_for_products(LEFT); }
template <int LEFT, int TILES>
static void wait_for(float (&d)[TILES][4]) { wait_for_sums(&d[0][0], LEFT); }
template <bool ADDS, int TILES>
static void multiply_async(float (&d)[TILES][4], unsigned long long a, unsigned long long b) {
    multiply_shared(&d[0][0], TILES, ADDS, a, b);
}
template <bool ADDS, int TILES>
static void multiply_async(float (&d)[TILES][4], const unsigned (&a)[4], unsigned long long b) {
    multiply_registers(&d[0][0], TILES, ADDS, a, b);
}
#endif
#include KERNEL_TEXT
#ifdef ZEROS_INSIDE
static unsigned long long words[LINE * (1 + COPIES)];
static const unsigned long long LAUNCH = 77;
#define MORE , words, LAUNCH
#else
#define MORE
#endif

struct Call { const void* p[16]; long long edges, in, out; };
static Call call;

static void run_kernel() {
    auto q = call.p;
#ifdef KERNEL_CALL
    KERNEL_CALL;
#else
    equitune_kernel((const Real*)q[0], (const Real*)q[1], (const Real*)q[2], (const Real*)q[3], (const Real*)q[4],
                    (const Real*)q[5], (const Real*)q[6], (const Real*)q[7], (Real*)q[8], (Real*)q[9], (Real*)q[10],
                    (Real*)q[11], (const index_t*)q[12], (const index_t*)q[13], (const int*)q[14], (const int*)q[15],
                    call.edges, call.in, call.out MORE);
#endif
}

extern "C" void emulate(const void** pointers, long long edges, long long in, long long out, int blocks, int threads) {
    for (int i = 0; i < 16; ++i) call.p[i] = pointers[i];
    call.edges = edges, call.in = in, call.out = out;
    must_wait = false;
#ifdef ZEROS_INSIDE
    must_wait = true;
    __builtin_memset(words, 0, sizeof words);
#endif
    run_blocks(run_kernel, blocks, threads, HIP_WAVE);
#ifdef ZEROS_INSIDE
    if (words[0]) { fprintf(stderr, "the next launch would count wrongly\n"); abort(); }
    for (int line = 1; line <= COPIES; ++line)
        if (words[line * LINE] != LAUNCH) { fprintf(stderr, "a line that was not told\n"); abort(); }
#endif
}
