// Gates: scalars become c a(s), and the components v of an irrep become c a(s) v, with a gate s for each channel.
// A thread has one channel of one node. A run of channels is (channels before it, channels, input, output, gate, dim,
// stride, activation, constant, parameter): offsets in a row of inputs f and of outputs, dim 0 for scalars, `stride`
// between components; the parameter is a cutoff's power. REAL is the type of an element. Orders: 0 the value; 1 its gradient by f, for cotangents g of the value;
// 2 the gradients by g and f of <t, that gradient>.
// An activation and its first two derivatives: 0 the identity, 1 SiLU, 2 tanh, 3 the logistic function, 4 the polynomial
// 1 - (p+1)(p+2)/2 s^p + p(p+2) s^(p+1) - p(p+1)/2 s^(p+2), 5 the same below 1 and zero from there on.
__device__ __forceinline__ void activate(long long kind, REAL p, REAL s, REAL (&a)[3]) {
    a[0] = s, a[1] = 1, a[2] = 0;
    if (kind == 1 || kind == 3) {
        const REAL l = 1 / (1 + exp(-s)), q = l * (1 - l);
        if (kind == 1)
            a[0] = s * l, a[1] = l + s * q, a[2] = q * (2 + s * (1 - 2 * l));
        else
            a[0] = l, a[1] = q, a[2] = q * (1 - 2 * l);
    } else if (kind == 2) {
        const REAL t = tanh(s);
        a[0] = t, a[1] = 1 - t * t, a[2] = -2 * t * (1 - t * t);
    } else if (kind == 5 && s >= 1) {
        a[0] = a[1] = 0;
    } else if (kind >= 4) {
        const REAL power = pow(s, p - 2), c = p * (p + 1) / 2, r = 1 - s;
        a[0] = 1 - power * s * s * ((p + 1) * (p + 2) / 2 - s * (p * (p + 2) - c * s));
        a[1] = -c * (p + 2) * power * s * r * r;
        a[2] = -c * (p + 2) * power * r * ((p - 1) * r - 2 * s);
    }
}

extern "C" __global__ void __launch_bounds__(256) equitune_gate(
    const REAL* __restrict__ f, const REAL* __restrict__ g, const REAL* __restrict__ t, REAL* __restrict__ of_f,
    REAL* __restrict__ of_g, const long long* __restrict__ table, long long nodes, long long runs, long long channels,
    long long inputs, long long outputs, long long order) {
    const long long at = blockIdx.x * 256ll + threadIdx.x, node = at / channels, channel = at % channels;
    if (node >= nodes) return;
    const long long* run = table;
    while (--runs && run[10] <= channel) run += 10;
    const long long c = channel - run[0], in = node * inputs + run[2] + c, out = node * outputs + run[3] + c;
    const long long gate = node * inputs + run[4] + c, dim = run[5], stride = run[6];
    const REAL constant = (REAL)__longlong_as_double(run[8]);
    REAL a[3];
    activate(run[7], (REAL)__longlong_as_double(run[9]), f[gate], a);
    for (int i = 0; i < 3; ++i) a[i] *= constant;
    if (dim == 0) {  // scalars: in is the gate's place too
        if (order == 0) of_g[out] = a[0];
        if (order == 1) of_f[in] = g[out] * a[1];
        if (order == 2) of_g[out] = t[in] * a[1], of_f[in] = t[in] * g[out] * a[2];
        return;
    }
    const REAL ts = order == 2 ? t[gate] : (REAL)0;
    REAL by_gate = 0, by_tangents = 0;  // sums of g v, and of g times the tangents of v
    for (long long m = 0; m < dim; ++m) {
        const long long i = in + m * stride, o = out + m * stride;
        const REAL v = f[i];
        if (order == 0) {
            of_g[o] = a[0] * v;
            continue;
        }
        by_gate += g[o] * v;
        if (order == 1) {
            of_f[i] = a[0] * g[o];
        } else {
            by_tangents += g[o] * t[i];
            of_g[o] = t[i] * a[0] + ts * a[1] * v;
            of_f[i] = ts * a[1] * g[o];
        }
    }
    if (order == 1) of_f[gate] = a[1] * by_gate;
    if (order == 2) of_f[gate] = a[1] * by_tangents + ts * a[2] * by_gate;
}
