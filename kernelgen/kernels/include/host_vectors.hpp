// Vectors of channels and changes of layout, for every host kernel.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define EQUITUNE_INLINE inline __attribute__((always_inline))
#define EQUITUNE_NOINLINE __attribute__((noinline))
#define EQUITUNE_LAMBDA __attribute__((always_inline))

namespace equitune {

#if defined(__AVX512F__)
constexpr int machine_bytes = 64;
#elif defined(__AVX__)
constexpr int machine_bytes = 32;
#else
constexpr int machine_bytes = 16;
#endif

// ---- Vectors: Vec<T, N> holds N channels; one scalar, one machine vector, or several of them.

template <class T, int N>
struct MachineVector {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class T>
struct MachineVector<T, 1> {
    using type = T;
};

// Compilers split vectors that are wider than the machine's through memory; this keeps the parts in registers.
template <class V, int Parts>
struct Pack {
    V part[Parts];
};

#define EQUITUNE_PACK_OPERATOR(op)                                                                        \
    template <class V, int P>                                                                             \
    EQUITUNE_INLINE Pack<V, P>& operator op##=(Pack<V, P>& a, const Pack<V, P>& b) {                      \
        for (int i = 0; i < P; ++i) a.part[i] op##= b.part[i];                                            \
        return a;                                                                                         \
    }                                                                                                     \
    template <class V, int P>                                                                             \
    EQUITUNE_INLINE Pack<V, P> operator op(Pack<V, P> a, const Pack<V, P>& b) {                           \
        return a op##= b;                                                                                 \
    }
EQUITUNE_PACK_OPERATOR(+)
EQUITUNE_PACK_OPERATOR(-)
EQUITUNE_PACK_OPERATOR(*)
#undef EQUITUNE_PACK_OPERATOR

template <class T, class V, int P, class = std::enable_if_t<std::is_arithmetic_v<T>>>
EQUITUNE_INLINE Pack<V, P> operator*(T a, Pack<V, P> b) {
    for (int i = 0; i < P; ++i) b.part[i] = a * b.part[i];
    return b;
}

template <class V, int P>
EQUITUNE_INLINE Pack<V, P> operator-(Pack<V, P> a) {
    for (int i = 0; i < P; ++i) a.part[i] = -a.part[i];
    return a;
}

template <class T, int N>
constexpr int machine_lanes = N * int(sizeof(T)) > machine_bytes ? machine_bytes / int(sizeof(T)) : N;

template <class T, int N>
using Vec = std::conditional_t<
    (N > machine_lanes<T, N>),
    Pack<typename MachineVector<T, machine_lanes<T, N>>::type, N / machine_lanes<T, N>>,
    typename MachineVector<T, machine_lanes<T, N>>::type>;

template <class V, class T>
constexpr int lanes = int(sizeof(V) / sizeof(T));

// Unaligned, and part by part: a copy of a whole Pack would pin it to memory.
template <class V>
struct Access {
    template <class T>
    static EQUITUNE_INLINE V load(const T* from) {
        V value;
        std::memcpy(&value, from, sizeof(V));
        return value;
    }
    template <class T>
    static EQUITUNE_INLINE void store(T* to, const V& value) {
        std::memcpy(to, &value, sizeof(V));
    }
};

template <class V, int P>
struct Access<Pack<V, P>> {
    template <class T>
    static EQUITUNE_INLINE Pack<V, P> load(const T* from) {
        Pack<V, P> value;
        for (int i = 0; i < P; ++i) value.part[i] = Access<V>::load(from + i * lanes<V, T>);
        return value;
    }
    template <class T>
    static EQUITUNE_INLINE void store(T* to, const Pack<V, P>& value) {
        for (int i = 0; i < P; ++i) Access<V>::store(to + i * lanes<V, T>, value.part[i]);
    }
};

template <class V, class T>
EQUITUNE_INLINE V load(const T* from) {
    return Access<V>::load(from);
}

template <class V, class T>
EQUITUNE_INLINE void store(T* to, const V& value) {
    Access<V>::store(to, value);
}

template <class V, class T>
EQUITUNE_INLINE void add(T* to, const V& value) {
    store(to, load<V>(to) + value);
}

// Written once and not read again here: past the caches where the row's alignment allows. Compiler builtins, because
// <immintrin.h> takes longer to parse than most kernels take to compile.
template <class V, class T>
EQUITUNE_INLINE void stream(T* to, const V& value, bool past_caches) {
#if defined(__SSE2__)
    if (past_caches && reinterpret_cast<std::uintptr_t>(to) % sizeof(V) == 0) {
#if defined(__clang__)
        if constexpr (sizeof(V) >= 16) return __builtin_nontemporal_store(value, reinterpret_cast<V*>(to));
#else
        using Bits = typename MachineVector<long long, (sizeof(V) < 16 ? 2 : sizeof(V) / 8)>::type;
#if defined(__AVX512F__)
        if constexpr (sizeof(V) == 64) return __builtin_ia32_movntdq512(reinterpret_cast<Bits*>(to), (Bits)value);
#endif
#if defined(__AVX__)
        if constexpr (sizeof(V) == 32) return __builtin_ia32_movntdq256(reinterpret_cast<Bits*>(to), (Bits)value);
#endif
        if constexpr (sizeof(V) == 16) return __builtin_ia32_movntdq(reinterpret_cast<Bits*>(to), (Bits)value);
#endif
    }
#else
    (void)past_caches;
#endif
    store(to, value);
}

template <class V, int P, class T>
EQUITUNE_INLINE void stream(T* to, const Pack<V, P>& value, bool past_caches) {
    for (int i = 0; i < P; ++i) stream(to + i * lanes<V, T>, value.part[i], past_caches);
}

// A weight row is read once an edge, in many short pieces: fetch the same piece of the next edge's row.
template <class V, class T>
EQUITUNE_INLINE V load_ahead(const T* from, std::int64_t ahead) {
    for (int byte = 0; byte < int(sizeof(V)); byte += 64) __builtin_prefetch(from + ahead + byte / int(sizeof(T)));
    return load<V>(from);
}

// Sum of the first N elements, by halves so that the additions do not wait for each other.
template <int N, class T>
EQUITUNE_INLINE T sum(const T* from) {
    if constexpr (N == 1) {
        return *from;
    } else {
        using Half = Vec<T, N / 2>;
        T half[N / 2];
        store(half, load<Half>(from) + load<Half>(from + N / 2));
        return sum<N / 2>(half);
    }
}

// ---- Layouts: a block is [channels, components] in mul_ir and [components, channels] in ir_mul.

template <int Offset, int Components, int Channels>
struct Block {
    static constexpr int offset = Offset, components = Components, channels = Channels, size = Components * Channels;
};

template <bool Add, class V, class T>
EQUITUNE_INLINE void put(T* to, const V& value) {
    if constexpr (Add) add(to, value);
    else store(to, value);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define EQUITUNE_SHUFFLES 1
#endif
#endif
#ifndef EQUITUNE_SHUFFLES
#define EQUITUNE_SHUFFLES 0
#endif

// N channels of D components are D vectors in either layout; element `lane` of vector `to` of the new layout is
// element `lane()` of vector `from()` of the old one. Each new vector gathers its lanes from the old ones in turn.
template <int N, int D, bool ToIrMul>
struct Interleave {
    static constexpr int from(int to, int lane) { return ToIrMul ? (lane * D + to) / N : (to * N + lane) % D; }
    static constexpr int lane(int to, int lane) { return ToIrMul ? (lane * D + to) % N : (to * N + lane) / D; }
    // Lane of the pair (gathered so far, vector `step`).
    static constexpr int pick(int to, int l, int step) {
        if (from(to, l) == step) return N + lane(to, l);
        return step > 1 ? l : lane(to, l);
    }

#if EQUITUNE_SHUFFLES
    template <int To, int Step, class V, int... L>
    static EQUITUNE_INLINE V gather(const V* old, V gathered, std::integer_sequence<int, L...> all) {
        if constexpr (Step == D) {
            return gathered;
        } else {
            return gather<To, Step + 1>(old, __builtin_shufflevector(gathered, old[Step], pick(To, L, Step)...), all);
        }
    }

    template <bool Add, class V, class T, int... To>
    static EQUITUNE_INLINE void move(const T* from, int from_stride, T* to, int to_stride,
                                     std::integer_sequence<int, To...>) {
        const V old[D] = {load<V>(from + To * from_stride)...};
        (put<Add>(to + To * to_stride, gather<To, 1>(old, old[0], std::make_integer_sequence<int, N>{})), ...);
    }
#endif
};

// Change the layout of one block, adding to `to` or overwriting it.
template <bool ToIrMul, bool Add, class B, class T>
EQUITUNE_INLINE void change_layout(const T* __restrict from, T* __restrict to) {
    constexpr int D = B::components, channels = B::channels, N = machine_bytes / int(sizeof(T));
    constexpr int whole = EQUITUNE_SHUFFLES && D > 1 ? channels / N * N : 0;
#if EQUITUNE_SHUFFLES
    if constexpr (whole > 0) {
        using Order = Interleave<N, D, ToIrMul>;
        constexpr auto vectors = std::make_integer_sequence<int, D>{};
        for (int u = 0; u < whole; u += N) {
            if constexpr (ToIrMul) Order::template move<Add, Vec<T, N>>(from + u * D, N, to + u, channels, vectors);
            else Order::template move<Add, Vec<T, N>>(from + u, channels, to + u * D, N, vectors);
        }
    }
#endif
    if constexpr (whole < channels) {
        for (int u = whole; u < channels; ++u)
            for (int m = 0; m < D; ++m) {
                const int rows = m * channels + u, columns = u * D + m;
                const T value = from[ToIrMul ? columns : rows];
                T& target = to[ToIrMul ? rows : columns];
                target = Add ? target + value : value;
            }
    }
}

template <bool Add, class B, class T>
EQUITUNE_INLINE void same_layout(const T* __restrict from, T* __restrict to) {
    for (int i = 0; i < B::size; ++i) to[i] = Add ? to[i] + from[i] : from[i];
}

}  // namespace equitune
