// The gradient by x of <c, a(x)> + <t, a'(x) g>, with a SiLU: a'(x) c + a''(x) g t; without c (null) the second term
// alone. A thread has four elements, a block's width apart. REAL is the type of an element.
extern "C" __global__ void __launch_bounds__(256) equitune_silu_gradient(
    const REAL* __restrict__ x, const REAL* __restrict__ c, const REAL* __restrict__ g, const REAL* __restrict__ t,
    REAL* __restrict__ out, long long count) {
    const long long first = blockIdx.x * 1024ll + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const long long i = first + 256 * k;
        if (i < count) {
            const REAL s = x[i], l = 1 / (1 + exp(-s)), q = l * (1 - l);
            const REAL second = q * (2 + s * (1 - 2 * l)) * g[i] * t[i];
            out[i] = c ? second + (l + s * q) * c[i] : second;
        }
    }
}
