// Node locks, workers and the three walks over a graph, for every host kernel (after host_vectors.hpp). Generated text
// follows and supplies a `Form`: constants, blocks and the arithmetic of one edge.
#include <cstdlib>
#include <new>

#include <omp.h>
#include <sched.h>

namespace equitune {

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
    const T *x, *tx, *y, *ty, *w, *tw, *g, *tg;
    T *out_x, *out_y, *out_w, *out_g;
    std::int64_t ahead;  // elements from this edge's weight row to the next one's
    bool past_caches;    // whether all of out_w is larger than the caches
};

template <class T, class Index>
struct Arguments {
    const T *x, *tx, *y, *ty, *w, *tw, *g, *tg;
    T *out_x, *out_y, *out_w, *out_g;
    const Index *sender, *receiver;
    const std::int32_t *spans, *perm;
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
        const std::size_t count = 3 * in + 3 * out + padded(Form::dim_in2 * (Form::block + 1)) + weights;
        memory_ = static_cast<T*>(std::aligned_alloc(64, count * sizeof(T)));
        if (!memory_) throw std::bad_alloc();
        std::memset(memory_, 0, count * sizeof(T));
        T* next = memory_;
        for (auto [rows, size] : {std::pair<T**, std::size_t>{&x_, in}, {&tx_, in}, {&out_x_, in}, {&g_, out}, {&tg_, out},
                                  {&out_g_, out}, {&out_y_, padded(Form::dim_in2 * (Form::block + 1))}, {&out_w_, weights}}) {
            *rows = next;
            next += size;
        }
        const std::int64_t out_w_bytes = args.num_edges * Form::weight_numel * std::int64_t(sizeof(T));
        edge_.past_caches = !Form::shared_weights && out_w_bytes > streamed_bytes;
    }
    ~Worker() { std::free(memory_); }
    Worker(const Worker&) = delete;
    Worker& operator=(const Worker&) = delete;

    // The cotangent rows of a destination, for the edges that follow.
    void read_out(std::int64_t row) {
        if constexpr (Form::reads_g) edge_.g = out_rows(args_.g + row * Form::dim_out, g_);
        if constexpr (Form::reads_tg) edge_.tg = out_rows(args_.tg + row * Form::dim_out, tg_);
    }

    // The feature rows of a source, for the edges that follow.
    void read_in(std::int64_t row) {
        if constexpr (Form::reads_x) edge_.x = in_rows(args_.x + row * Form::dim_in1, x_);
        if constexpr (Form::reads_tx) edge_.tx = in_rows(args_.tx + row * Form::dim_in1, tx_);
    }

    // Start the sums of one destination, in the output row itself where its layout allows.
    void begin_sums(std::int64_t row) {
        if constexpr (Form::writes_g) {
            const bool direct = !Form::mul_ir && Form::owns_receiver;
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

    // Where the gradients of a source row go: the row itself where nobody else writes it and its layout allows.
    void begin_x(std::int64_t row) {
        if constexpr (Form::writes_x) {
            const bool direct = !Form::mul_ir && (!Form::conv || Form::owns_sender);
            edge_.out_x = direct ? args_.out_x + row * Form::dim_in1 : out_x_;
            if (Form::owns_sender) std::memset(edge_.out_x, 0, Form::dim_in1 * sizeof(T));
        }
    }

    // Write the gradients of a source that no other worker has, or add them under its lock.
    void finish_x(std::int64_t row) {
        if constexpr (Form::writes_x) {
            T* target = args_.out_x + row * Form::dim_in1;
            if constexpr (Form::conv && !Form::owns_sender) {
                in_locks_.lock(row);
                Form::in1_blocks([&](auto block) { flush<true, decltype(block)>(out_x_, target); });
                in_locks_.unlock(row);
            } else if constexpr (Form::mul_ir) {
                Form::in1_blocks([&](auto block) { flush<false, decltype(block)>(out_x_, target); });
            }
        }
    }

    // Everything about edge `e` apart from the rows of its nodes. Edge `next` is likely to follow.
    void edge(std::int64_t e, std::int64_t next) {
        T* const own_y = out_y_ + Form::dim_in2 * Form::block;  // a row of values where y are vectors, then of sums
        if constexpr (Form::reads_y) {
            if constexpr (Form::y_are_vectors) Form::harmonics(args_.y + e * 3, own_y);
            edge_.y = Form::y_are_vectors ? own_y : args_.y + e * Form::dim_in2;
        }
        if constexpr (Form::reads_ty) edge_.ty = args_.ty + e * Form::dim_in2;
        const std::int64_t weights = Form::shared_weights ? 0 : e * Form::weight_numel;
        edge_.ahead = Form::shared_weights ? 0 : (next - e) * Form::weight_numel;
        if constexpr (Form::reads_w) edge_.w = args_.w + weights;
        if constexpr (Form::reads_tw) edge_.tw = args_.tw + weights;
        if constexpr (Form::writes_w) edge_.out_w = Form::shared_weights ? out_w_ : args_.out_w + weights;
        if constexpr (Form::writes_y) {
            edge_.out_y = out_y_;
            std::memset(out_y_, 0, Form::dim_in2 * Form::block * sizeof(T));
        }
        Form::edge(edge_);
        if constexpr (Form::writes_y) {
            T* const sums = Form::y_are_vectors ? own_y : args_.out_y + e * Form::dim_in2;
            for (int m = 0; m < Form::dim_in2; ++m) sums[m] = sum<Form::block>(out_y_ + m * Form::block);
            if constexpr (Form::y_are_vectors) Form::along_v(args_.y + e * 3, sums, args_.out_y + e * 3);
        }
    }

    // An edge whose source is its own business.
    void edge_from(std::int64_t e, std::int64_t source, std::int64_t next) {
        read_in(source);
        begin_x(source);
        edge(e, next);
        finish_x(source);
    }

    // Edge-by-edge operation: the rows of both nodes are the edge's own.
    void plain_edge(std::int64_t e, std::int64_t next) {
        read_out(e);
        if constexpr (Form::writes_g) edge_.out_g = Form::mul_ir ? out_g_ : args_.out_g + e * Form::dim_out;
        edge_from(e, e, next);
        store_sums(e);
    }

    // Make this thread's writes visible; with shared weights, hand over its sums.
    void finish() {
#if defined(__SSE2__)
        __builtin_ia32_sfence();  // streamed rows are ordered by nothing else
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

    template <class B>
    static EQUITUNE_INLINE void fetch(const T* row, T* scratch) {
        change_layout<true, false, B>(row + B::offset, scratch + B::offset);
    }

    static const T* in_rows(const T* row, T* scratch) {
        if constexpr (!Form::mul_ir) return row;
        Form::in1_blocks([&](auto block) { fetch<decltype(block)>(row, scratch); });
        return scratch;
    }

    static const T* out_rows(const T* row, T* scratch) {
        if constexpr (!Form::mul_ir) return row;
        Form::out_blocks([&](auto block) { fetch<decltype(block)>(row, scratch); });
        return scratch;
    }

    void write_out(T* target) {
        Form::out_blocks([&](auto block) { flush<false, decltype(block)>(out_g_, target); });
    }

    const Args& args_;
    Locks &in_locks_, &out_locks_;
    Edge<T> edge_{};
    T *memory_, *x_, *tx_, *out_x_, *g_, *tg_, *out_g_, *out_y_, *out_w_;
};

// ---- Walks. A worker runs all path groups of an edge, so no block of an output has two writers at a time but by lock.

inline std::int64_t after(std::int64_t i, std::int64_t count) { return i + 1 < count ? i + 1 : i; }

// One worker takes all edges of a node; nodes are dealt out by about Form::edges_per_chunk edges.
template <class Form>
void walk_nodes(Worker<Form>& worker, const typename Worker<Form>::Args& args) {
    const std::int64_t nodes = Form::owns_receiver ? args.num_out : args.num_in;
    const std::int64_t degree = nodes ? args.num_edges / nodes : 0;
    const std::int64_t chunk = degree < Form::edges_per_chunk ? Form::edges_per_chunk / (degree ? degree : 1) : 1;
#pragma omp for schedule(dynamic, chunk)
    for (std::int64_t number = 0; number < nodes; ++number) {
        const std::int32_t* const span = args.spans + 3 * number;
        const std::int64_t node = span[0], begin = span[1], end = span[2];
        if constexpr (Form::owns_receiver) {
            worker.begin_sums(node);
            if (begin < end) worker.read_out(node);
        } else {
            worker.begin_x(node);
            if (begin < end) worker.read_in(node);
        }
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t e = args.perm ? args.perm[i] : i, j = after(i, args.num_edges);
            const std::int64_t next = args.perm ? args.perm[j] : j;
            if constexpr (Form::owns_receiver) {
                worker.edge_from(e, args.sender[e], next);
            } else {
                worker.read_out(args.receiver[e]);
                worker.begin_sums(args.receiver[e]);
                worker.edge(e, next);
                worker.add_sums(args.receiver[e]);
            }
        }
        if constexpr (Form::owns_receiver) worker.store_sums(node);
        else worker.finish_x(node);
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
                worker.read_out(destination);
            }
            worker.edge_from(e, args.sender[e], after(e, args.num_edges));
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
    Locks in_locks(Form::conv && Form::writes_x && !Form::owns_sender ? args.num_in : 0);
    Locks out_locks(Form::conv && Form::writes_g && !Form::owns_receiver ? args.num_out : 0);
#pragma omp parallel num_threads(args.threads > 0 ? args.threads : omp_get_max_threads())
    {
        Worker<Form> worker(args, in_locks, out_locks);
        if constexpr (!Form::conv) walk_plain<Form>(worker, args);
        else if constexpr (Form::owns_receiver || Form::owns_sender) walk_nodes<Form>(worker, args);
        else walk_edges<Form>(worker, args);
        worker.finish();
    }
}

}  // namespace equitune
