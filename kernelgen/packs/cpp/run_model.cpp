// Runs a model that AOTInductor compiled, without Python: an example, and what Equitune's tests run.
//
//     EQUITUNE_PACK=model.pack ./run_model model.pt2 libequitune.so inputs.pt outputs.pt [DEVICE]
//
// inputs.pt: a list of tensors by torch.save, which are brought to DEVICE (such as cuda:0) if it is given. outputs.pt: the
// model's outputs on the CPU, for torch.load. docs/how-to/cpp.md says how to build it.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/types.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>

namespace {

std::vector<char> bytes_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool has_python() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
        if (line.find("libpython") != std::string::npos || line.find("libtorch_python") != std::string::npos) return true;
    return false;
}

// On a GPU the outputs are copied to the host, and so are there.
std::vector<torch::Tensor> results(torch::inductor::AOTIModelPackageLoader& model, const std::vector<torch::Tensor>& inputs) {
    auto found = model.run(inputs);
    for (torch::Tensor& output : found) output = output.cpu();
    return found;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int main(int count, char** given) {
    if (count != 5 && count != 6) {
        std::cerr << "usage: run_model MODEL.pt2 LIBEQUITUNE.so INPUTS.pt OUTPUTS.pt [DEVICE]\n";
        return 2;
    }
    try {
        if (dlopen(given[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
        const c10::InferenceMode mode;
        torch::inductor::AOTIModelPackageLoader model(given[1]);
        const c10::IValue list = torch::jit::pickle_load(bytes_of(given[3]));
        std::vector<torch::Tensor> inputs;
        for (const c10::IValue& input : list.toListRef()) inputs.push_back(input.toTensor());
        if (count == 6)
            for (torch::Tensor& input : inputs) input = input.to(torch::Device(given[5]));
        auto begin = std::chrono::steady_clock::now();
        auto outputs = results(model, inputs);
        const double first = seconds_since(begin);
        begin = std::chrono::steady_clock::now();
        outputs = results(model, inputs);
        const auto saved = torch::jit::pickle_save(outputs);
        std::ofstream(given[4], std::ios::binary).write(saved.data(), static_cast<std::streamsize>(saved.size()));
        std::cout << "first call " << first << " s, second " << seconds_since(begin) << " s, Python "
                  << (has_python() ? "loaded" : "absent") << "\n";
    } catch (const std::exception& error) {
        std::cerr << "run_model: " << error.what() << "\n";
        return 1;
    }
}
