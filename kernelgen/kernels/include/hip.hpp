// What CUDA's built-in names mean on an AMD GPU, before the text of a kernel. The emitter defines WAVE, the lanes that run
// in step (64 or 32). A warp of the text is 32 lanes that lie together in a wave, and a team never crosses it. Compiled
// and emulated, never run on such a GPU.
#ifdef __HIP__
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline __attribute__((always_inline))
// With a number of blocks: the waves that each of a compute unit's four SIMDs (two with waves of 32) holds at least.
constexpr int SIMDS = WAVE == 64 ? 4 : 2;
#define BOUNDS_OF_BLOCK(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define BOUNDS_OF_BLOCKS(threads, blocks) \
    __attribute__((amdgpu_flat_work_group_size(threads, threads), \
                   amdgpu_waves_per_eu(((threads) * (blocks) + WAVE * SIMDS - 1) / (WAVE * SIMDS))))
#define CHOSEN_BOUNDS(one, two, chosen, ...) chosen
#define __launch_bounds__(...) CHOSEN_BOUNDS(__VA_ARGS__, BOUNDS_OF_BLOCKS, BOUNDS_OF_BLOCK)(__VA_ARGS__)

struct HipIndex { unsigned x; };
#define threadIdx (HipIndex{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (HipIndex{__builtin_amdgcn_workgroup_id_x()})
#define blockDim (HipIndex{__builtin_amdgcn_workgroup_size_x()})
#define gridDim (HipIndex{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})

template <class T>
__device__ __forceinline__ T min(T a, T b) { return b < a ? b : a; }
__device__ __forceinline__ float sqrt(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ double sqrt(double x) { return __builtin_sqrt(x); }

template <class T>
__device__ __forceinline__ T atomicAdd(T* p, T value) {
    return __hip_atomic_fetch_add(p, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

__device__ __forceinline__ void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The lanes of a wave run in step and its accesses of shared memory are done in order, so its barrier takes no
// instruction; it and the fences of a wave (none either) keep the compiler from moving accesses across.
__device__ __forceinline__ void wave_barrier(unsigned long long) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// The value of another lane of the wave, which must be at the same place; `mask` has the lanes that are.
template <class T>
__device__ __forceinline__ T lane_value(unsigned long long, T value, int lane) {
    int words[sizeof(T) / 4];
    __builtin_memcpy(words, &value, sizeof(T));
    _Pragma("unroll") for (int& word : words) word = __builtin_amdgcn_ds_bpermute(lane * 4, word);
    __builtin_memcpy(&value, words, sizeof(T));
    return value;
}
#endif

// The lanes of a wave that a mask of the warp's 32 lanes names.
__device__ __forceinline__ unsigned long long wave_mask(unsigned mask) {
    return (unsigned long long)mask << (threadIdx.x % WAVE & 32u);
}
__device__ __forceinline__ void __syncwarp(unsigned mask) { wave_barrier(wave_mask(mask)); }
template <class T>
__device__ __forceinline__ T __shfl_sync(unsigned mask, T value, int from, int width) {
    return lane_value(wave_mask(mask), value, int(threadIdx.x % WAVE) / width * width + from % width);
}
template <class T>
__device__ __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int bit) {
    return lane_value(wave_mask(mask), value, int(threadIdx.x % WAVE) ^ bit);
}
