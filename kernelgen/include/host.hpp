// The part of every host kernel that never changes: vectors of channels, layout changes, node locks and the three
// walks over a graph. Generated text follows it and supplies a `Form`: constants, blocks and the arithmetic of one edge.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#include <omp.h>
#include <sched.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

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

template <class V, class T>
EQUITUNE_INLINE V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof(V));
    return value;
}

template <class V, class T>
EQUITUNE_INLINE void store(T* to, const V& value) {
    std::memcpy(to, &value, sizeof(V));
}

template <class V, class T>
EQUITUNE_INLINE void add(T* to, const V& value) {
    store(to, load<V>(to) + value);
}

// Written once and not read again here: past the caches where the row's alignment allows.
template <class V, class T>
EQUITUNE_INLINE void stream(T* to, const V& value, bool past_caches) {
#if defined(__SSE2__)
    if (past_caches && reinterpret_cast<std::uintptr_t>(to) % sizeof(V) == 0) {
#if defined(__AVX512F__)
        if constexpr (sizeof(V) == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#endif
#if defined(__AVX__)
        if constexpr (sizeof(V) == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#endif
        if constexpr (sizeof(V) == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
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

// ---- Locks: one byte a node, taken for the few hundred additions of one row.

class Locks {
public:
    explicit Locks(std::int64_t count) : bytes_(static_cast<unsigned char*>(std::calloc(count > 0 ? count : 1, 1))) {
        if (!bytes_) throw std::bad_alloc();
    }
    ~Locks() { std::free(bytes_); }
    Locks(const Locks&) = delete;
    Locks& operator=(const Locks&) = delete;

    void lock(std::int64_t node) {
        for (int spins = 1; __atomic_test_and_set(bytes_ + node, __ATOMIC_ACQUIRE); ++spins)
            if (spins % 256 == 0) sched_yield();  // the owner may be waiting for this core
    }
    void unlock(std::int64_t node) { __atomic_clear(bytes_ + node, __ATOMIC_RELEASE); }

private:
    unsigned char* bytes_;
};

// ---- One edge and one worker.

// From this size on, an output that is written once would only push other data out of the caches.
constexpr std::int64_t streamed_bytes = 16 << 20;

// Rows of one edge, every one in ir_mul. out_y holds Form::block partial sums for each component.
template <class T>
struct Edge {
    const T *x, *tx, *y, *ty, *w, *tw, *g;
    T *out_x, *out_y, *out_w, *out_g;
    std::int64_t ahead;  // elements from this edge's weight row to the next one's
    bool past_caches;    // whether all of out_w is larger than the caches
};

template <class T, class Index>
struct Arguments {
    const T *x, *tx, *y, *ty, *w, *tw, *g;
    T *out_x, *out_y, *out_w, *out_g;
    const Index *sender, *receiver;
    const std::int32_t *row_ptr, *perm;
    std::int64_t num_edges, num_in, num_out;
    int threads;
};

// A thread's scratch rows, and the steps that the three walks share. Only operands that Form names are touched.
template <class Form>
class Worker {
public:
    using T = typename Form::T;
    using Args = Arguments<T, typename Form::Index>;

    Worker(const Args& args, Locks& in_locks, Locks& out_locks)
        : args_(args), in_locks_(in_locks), out_locks_(out_locks) {
        const std::size_t in = padded(Form::dim_in1), out = padded(Form::dim_out);
        const std::size_t weights = Form::shared_weights ? padded(Form::weight_numel) : 0;
        const std::size_t count = 3 * in + 2 * out + padded(Form::dim_in2 * Form::block) + weights;
        memory_ = static_cast<T*>(std::aligned_alloc(64, count * sizeof(T)));
        if (!memory_) throw std::bad_alloc();
        std::memset(memory_, 0, count * sizeof(T));
        T* next = memory_;
        for (auto [rows, size] : {std::pair<T**, std::size_t>{&x_, in}, {&tx_, in}, {&out_x_, in}, {&g_, out},
                                  {&out_g_, out}, {&out_y_, padded(Form::dim_in2 * Form::block)}, {&out_w_, weights}}) {
            *rows = next;
            next += size;
        }
        const std::int64_t out_w_bytes = args.num_edges * Form::weight_numel * std::int64_t(sizeof(T));
        edge_.past_caches = !Form::shared_weights && out_w_bytes > streamed_bytes;
    }
    ~Worker() { std::free(memory_); }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // The cotangent row that following edges read.
    void read_g(std::int64_t row) {
        if constexpr (Form::reads_g) edge_.g = out_rows(args_.g + row * Form::dim_out, g_);
    }

    // Start the sums of one destination, in the output row itself where its layout allows.
    void begin_sums(std::int64_t row) {
        if constexpr (Form::writes_g) {
            const bool direct = !Form::mul_ir && Form::owns_destination;
            edge_.out_g = direct ? args_.out_g + row * Form::dim_out : out_g_;
            std::memset(edge_.out_g, 0, Form::dim_out * sizeof(T));
        }
    }

    // Write the sums of a destination that no other worker has.
    void store_sums(std::int64_t row) {
        if constexpr (Form::writes_g && Form::mul_ir) write_out(args_.out_g + row * Form::dim_out);
    }

    // Add the sums of a destination that other workers may be adding to.
    void add_sums(std::int64_t row) {
        if constexpr (Form::writes_g) {
            out_locks_.lock(row);
            T* target = args_.out_g + row * Form::dim_out;
            Form::out_blocks([&](auto block) { flush<true, decltype(block)>(out_g_, target); });
            out_locks_.unlock(row);
        }
    }

    // Everything about edge `e` whose first operand is row `row`, apart from the rows of its destination. Edge `next`
    // is likely to follow.
    void edge(std::int64_t e, std::int64_t row, std::int64_t next) {
        if constexpr (Form::reads_x) edge_.x = in_rows(args_.x + row * Form::dim_in1, x_);
        if constexpr (Form::reads_tx) edge_.tx = in_rows(args_.tx + row * Form::dim_in1, tx_);
        if constexpr (Form::reads_y) edge_.y = args_.y + e * Form::dim_in2;
        if constexpr (Form::reads_ty) edge_.ty = args_.ty + e * Form::dim_in2;
        const std::int64_t weights = Form::shared_weights ? 0 : e * Form::weight_numel;
        edge_.ahead = Form::shared_weights ? 0 : (next - e) * Form::weight_numel;
        if constexpr (Form::reads_w) edge_.w = args_.w + weights;
        if constexpr (Form::reads_tw) edge_.tw = args_.tw + weights;
        if constexpr (Form::writes_w) edge_.out_w = Form::shared_weights ? out_w_ : args_.out_w + weights;
        if constexpr (Form::writes_x) {
            const bool direct = !Form::mul_ir && !Form::conv;
            edge_.out_x = direct ? args_.out_x + row * Form::dim_in1 : out_x_;
        }
        if constexpr (Form::writes_y) {
            edge_.out_y = out_y_;
            std::memset(out_y_, 0, Form::dim_in2 * Form::block * sizeof(T));
        }
        Form::edge(edge_);
        if constexpr (Form::writes_y) {
            T* target = args_.out_y + e * Form::dim_in2;
            for (int m = 0; m < Form::dim_in2; ++m) target[m] = sum<Form::block>(out_y_ + m * Form::block);
        }
        if constexpr (Form::writes_x) finish_x(row);
    }

    // Edge-by-edge operation: the rows of the destination are the edge's own.
    void plain_edge(std::int64_t e, std::int64_t next) {
        read_g(e);
        if constexpr (Form::writes_g) edge_.out_g = Form::mul_ir ? out_g_ : args_.out_g + e * Form::dim_out;
        edge(e, e, next);
        store_sums(e);
    }

    // Make this thread's writes visible; with shared weights, hand over its sums.
    void finish() {
#if defined(__SSE2__)
        _mm_sfence();  // streamed rows are ordered by nothing else
#endif
        if constexpr (Form::writes_w && Form::shared_weights) {
#pragma omp critical(equitune_out_w)
            for (int i = 0; i < Form::weight_numel; ++i) args_.out_w[i] += out_w_[i];
        }
    }

private:
    static constexpr std::size_t padded(std::size_t count) { return (count + 15) / 16 * 16; }

    template <bool Add, class B>
    static EQUITUNE_INLINE void flush(const T* rows, T* target) {
        if constexpr (Form::mul_ir) change_layout<false, Add, B>(rows + B::offset, target + B::offset);
        else same_layout<Add, B>(rows + B::offset, target + B::offset);
    }

    static const T* in_rows(const T* row, T* scratch) {
        if constexpr (!Form::mul_ir) return row;
        Form::in1_blocks([&](auto block) {
            change_layout<true, false, decltype(block)>(row + decltype(block)::offset, scratch + decltype(block)::offset);
        });
        return scratch;
    }

    static const T* out_rows(const T* row, T* scratch) {
        if constexpr (!Form::mul_ir) return row;
        Form::out_blocks([&](auto block) {
            change_layout<true, false, decltype(block)>(row + decltype(block)::offset, scratch + decltype(block)::offset);
        });
        return scratch;
    }

    void write_out(T* target) {
        Form::out_blocks([&](auto block) { flush<false, decltype(block)>(out_g_, target); });
    }

    void finish_x(std::int64_t row) {
        T* target = args_.out_x + row * Form::dim_in1;
        if constexpr (Form::conv) {
            in_locks_.lock(row);
            Form::in1_blocks([&](auto block) { flush<true, decltype(block)>(out_x_, target); });
            in_locks_.unlock(row);
        } else if constexpr (Form::mul_ir) {
            Form::in1_blocks([&](auto block) { flush<false, decltype(block)>(out_x_, target); });
        }
    }

    const Args& args_;
    Locks &in_locks_, &out_locks_;
    Edge<T> edge_{};
    T *memory_, *x_, *tx_, *out_x_, *g_, *out_g_, *out_y_, *out_w_;
};

// ---- Walks. A worker runs all path groups of an edge, so no block of an output has two writers at a time but by lock.

inline std::int64_t after(std::int64_t i, std::int64_t count) { return i + 1 < count ? i + 1 : i; }

// One worker sums all edges of a destination; destinations are dealt out in chunks of about Form::edges_per_chunk edges.
template <class Form>
void walk_destinations(Worker<Form>& worker, const typename Worker<Form>::Args& args) {
    const std::int64_t degree = args.num_out ? args.num_edges / args.num_out : 0;
    const std::int64_t chunk = degree < Form::edges_per_chunk ? Form::edges_per_chunk / (degree ? degree : 1) : 1;
#pragma omp for schedule(dynamic, chunk)
    for (std::int64_t destination = 0; destination < args.num_out; ++destination) {
        const std::int64_t begin = args.row_ptr[destination], end = args.row_ptr[destination + 1];
        worker.begin_sums(destination);
        if (begin < end) worker.read_g(destination);
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t e = args.perm ? args.perm[i] : i, j = after(i, args.num_edges);
            worker.edge(e, args.sender[e], args.perm ? args.perm[j] : j);
        }
        worker.store_sums(destination);
    }
}

// Edges in the given order; the sums of a run of equal destinations are added to the output when the run ends.
template <class Form>
void walk_edges(Worker<Form>& worker, const typename Worker<Form>::Args& args) {
#pragma omp for schedule(dynamic, 1)
    for (std::int64_t begin = 0; begin < args.num_edges; begin += Form::edges_per_chunk) {
        const std::int64_t stop = begin + Form::edges_per_chunk;
        const std::int64_t end = stop < args.num_edges ? stop : args.num_edges;
        std::int64_t destination = -1;
        for (std::int64_t e = begin; e < end; ++e) {
            if (args.receiver[e] != destination) {
                if (destination >= 0) worker.add_sums(destination);
                destination = args.receiver[e];
                worker.begin_sums(destination);
                worker.read_g(destination);
            }
            worker.edge(e, args.sender[e], after(e, args.num_edges));
        }
        worker.add_sums(destination);
    }
}

template <class Form>
void walk_plain(Worker<Form>& worker, const typename Worker<Form>::Args& args) {
#pragma omp for schedule(dynamic, Form::edges_per_chunk)
    for (std::int64_t e = 0; e < args.num_edges; ++e) worker.plain_edge(e, after(e, args.num_edges));
}

template <class Form>
void run(const typename Worker<Form>::Args& args) {
    Locks in_locks(Form::conv && Form::writes_x ? args.num_in : 0);
    Locks out_locks(Form::conv && Form::writes_g && !Form::owns_destination ? args.num_out : 0);
#pragma omp parallel num_threads(args.threads > 0 ? args.threads : omp_get_max_threads())
    {
        Worker<Form> worker(args, in_locks, out_locks);
        if constexpr (!Form::conv) walk_plain<Form>(worker, args);
        else if constexpr (Form::owns_destination) walk_destinations<Form>(worker, args);
        else walk_edges<Form>(worker, args);
        worker.finish();
    }
}

}  // namespace equitune
