// What generated texts call of cuda_emulator.cpp: lanes that wait for each other, and tensor cores.
#pragma once

struct Dim { unsigned x; };
extern Dim threadIdx, blockIdx, gridDim, blockDim;
alignas(16) extern unsigned char shared_bytes[256 * 1024];

namespace emulator {

typedef unsigned long long Mask;  // of the lanes that run in step
const int MOST = 1024;
extern int WARP;  // lanes
extern int current;
alignas(16) extern unsigned char slots[MOST][16];
extern bool must_wait, waited[MOST];

void barrier(Mask mask);
void wait_for_block();
void run_blocks(void (*kernel)(), int blocks, int threads, int warp);

// Tensor cores (mma.m16n8k16, ldmatrix, movmatrix).
const unsigned ALL = 0xffffffffu;
unsigned halves(float low, float high);
float low_half(unsigned both);
float high_half(unsigned both);
unsigned reduce_max(unsigned mask, unsigned value);
void load_matrix(const unsigned short* row, unsigned (&r)[4], bool is_transposed);
void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
float operand_in_tf32(float value);
void multiply_add_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]);
unsigned transposed(unsigned both);

// Products of four warps (wgmma): d is [tiles][4].
void wait_for_warpgroup();
unsigned shared_address(const unsigned short* place);
void show_to_tensor_cores();
void begin_products();
void end_products();
void wait_for_products(int left);
void wait_for_sums(const float* d, int left);
void multiply_shared(float* d, int tiles, bool adds, unsigned long long a, unsigned long long b);
void multiply_registers(float* d, int tiles, bool adds, const unsigned (&a)[4], unsigned long long b);

}  // namespace emulator
