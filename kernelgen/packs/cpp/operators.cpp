// The operators ``equitune::*`` for programs without Python: the same names and schemas as in kernelgen/ops, so that
// exported models find them. Kernels come from packs. Uses torch's stable ABI alone (2.10 and later).
#include "calls.hpp"

namespace {

using namespace equitune;

constexpr std::size_t X = 0, TX = 1, Y = 2, TY = 3, W = 4, TW = 5, G = 6;  // of a fused convolution TW is the matrix

Given of_edges(const Tensor& x, const Tensor& y, const Tensor& w, const Maybe& sender, const Maybe& receiver,
               const Maybe& spans, const Maybe& perm, const Maybe& sender_spans, const Maybe& sender_perm,
               std::int64_t num_out) {
    Given given;
    given.operands[X] = x;
    given.operands[Y] = y;
    given.operands[W] = w;
    given.edges = y.size(0);
    if (!sender || !receiver) {
        given.num_in = given.num_out = given.edges;
        return given;
    }
    given.sender = sender;
    given.receiver = receiver;
    given.spans = spans;
    given.perm = perm;
    given.sender_spans = sender_spans;
    given.sender_perm = sender_perm;
    given.num_in = x.size(0);
    given.num_out = num_out;
    if (sender->numel() != given.edges || receiver->numel() != given.edges)
        refuse("sender and receiver need one index for each row of y");
    check_range("sender", *sender, given.num_in);
    check_range("receiver", *receiver, num_out);
    return given;
}

const Operator& found(const std::string& spec, const Given& given) {
    return Packs::all().find(spec).of_size(given.edges, given.num_out);
}

Tensor or_empty(const Found& found, char slot, const Tensor& like) {
    const Maybe& tensor = found[SLOTS.find(slot)];
    return tensor ? *tensor : torch::stable::new_empty(like, Sizes{0});
}

std::string present(const char* slots, std::initializer_list<const Maybe*> tangents) {
    std::string found;
    for (const Maybe* tangent : tangents) {
        if (*tangent) found += *slots;
        ++slots;
    }
    return found;
}

Tensor tp_forward(Tensor x, Tensor y, Tensor w, Maybe sender, Maybe receiver, Maybe spans, Maybe perm,
                  Maybe sender_spans, Maybe sender_perm, std::int64_t num_out, std::string spec) {
    const Given given = of_edges(x, y, w, sender, receiver, spans, perm, sender_spans, sender_perm, num_out);
    return or_empty(run_call(found(spec, given), "tp_forward", given), 'g', x);
}

std::tuple<Tensor, Tensor, Tensor> tp_backward(Tensor x, Tensor y, Tensor w, Tensor g, Maybe sender, Maybe receiver,
                                               Maybe spans, Maybe perm, Maybe sender_spans, Maybe sender_perm,
                                               std::int64_t num_out, std::string outputs, std::string spec) {
    Given given = of_edges(x, y, w, sender, receiver, spans, perm, sender_spans, sender_perm, num_out);
    given.operands[G] = g;
    const Found made = run_call(found(spec, given), "tp_backward " + outputs, given);
    return {or_empty(made, 'x', x), or_empty(made, 'y', x), or_empty(made, 'w', x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> tp_double_backward(Tensor x, Tensor y, Tensor w, Tensor g, Maybe tx, Maybe ty,
                                                              Maybe tw, Maybe sender, Maybe receiver, Maybe spans,
                                                              Maybe perm, Maybe sender_spans, Maybe sender_perm,
                                                              std::int64_t num_out, std::string outputs,
                                                              std::string spec) {
    Given given = of_edges(x, y, w, sender, receiver, spans, perm, sender_spans, sender_perm, num_out);
    given.operands[G] = g;
    given.operands[TX] = tx;
    given.operands[TY] = ty;
    given.operands[TW] = tw;
    const std::string name = "tp_double_backward " + present("xyw", {&tx, &ty, &tw}) + " " + outputs;
    const Found made = run_call(found(spec, given), name, given);
    return {or_empty(made, 'x', x), or_empty(made, 'y', x), or_empty(made, 'w', x), or_empty(made, 'g', x)};
}

std::tuple<Tensor, Tensor> tp_order(Tensor nodes, std::int64_t num_out, std::int64_t count, std::string end,
                                    std::string spec) {
    const Operator& op = Packs::all().find(spec).of_size(nodes.numel(), num_out);
    if ((*op.facts)["needs"][end].is_true()) return order_by(nodes, count);
    return {torch::stable::new_empty(nodes, Sizes{count, 3}, ScalarType::Int),
            torch::stable::new_empty(nodes, Sizes{nodes.numel()}, ScalarType::Int)};  // which no kernel reads
}

Given of_rows(const Tensor& first) {
    Given given;
    given.operands[X] = first;
    given.edges = given.num_in = given.num_out = first.size(0);
    return given;
}

Tensor sh_forward(Tensor v, std::string spec) {
    const Given given = of_rows(v);
    return or_empty(run_call(found(spec, given), "sh_forward", given), 'g', v);
}

Tensor sh_backward(Tensor v, Tensor g, std::string spec) {
    Given given = of_rows(v);
    given.operands[G] = g;
    return or_empty(run_call(found(spec, given), "sh_backward", given), 'x', v);
}

std::tuple<Tensor, Tensor> sh_double_backward(Tensor v, Tensor g, Tensor t, std::string outputs, std::string spec) {
    Given given = of_rows(v);
    given.operands[G] = g;
    given.operands[TX] = t;
    const Found made = run_call(found(spec, given), "sh_double_backward " + outputs, given);
    return {or_empty(made, 'x', v), or_empty(made, 'g', v)};
}

Given of_nodes(const Tensor& x, const Tensor& w, const Tensor& elements) {
    Given given = of_rows(x);
    given.operands[W] = w;
    given.sender = elements;
    if (elements.numel() != given.edges) refuse("elements needs one index for each row of x");
    check_range("elements", elements, w.size(0));
    return given;
}

Tensor sc_forward(Tensor x, Tensor w, Tensor elements, std::string spec) {
    const Given given = of_nodes(x, w, elements);
    return or_empty(run_call(found(spec, given), "sc_forward", given), 'g', x);
}

std::tuple<Tensor, Tensor> sc_backward(Tensor x, Tensor w, Tensor g, Tensor elements, std::string outputs,
                                       std::string spec) {
    Given given = of_nodes(x, w, elements);
    given.operands[G] = g;
    const Found made = run_call(found(spec, given), "sc_backward " + outputs, given);
    return {or_empty(made, 'x', x), or_empty(made, 'w', x)};
}

std::tuple<Tensor, Tensor, Tensor> sc_double_backward(Tensor x, Tensor w, Tensor g, Maybe tx, Maybe tw, Tensor elements,
                                                      std::string outputs, std::string spec) {
    Given given = of_nodes(x, w, elements);
    given.operands[G] = g;
    given.operands[TX] = tx;
    given.operands[TW] = tw;
    const std::string name = "sc_double_backward " + present("xw", {&tx, &tw}) + " " + outputs;
    const Found made = run_call(found(spec, given), name, given);
    return {or_empty(made, 'x', x), or_empty(made, 'w', x), or_empty(made, 'g', x)};
}

Given of_radial(const Tensor& x, const Tensor& y, const Tensor& h, const Tensor& matrix, const Tensor& sender,
                const Tensor& spans, const Maybe& perm) {
    Given given;
    given.operands[X] = x;
    given.operands[Y] = y;
    given.operands[W] = h;
    given.operands[TW] = matrix;
    given.sender = sender;
    given.spans = spans;
    given.perm = perm;
    given.edges = y.size(0);
    given.num_in = x.size(0);
    given.num_out = spans.size(0);
    if (sender.numel() != given.edges) refuse("sender needs one index for each row of y");
    check_range("sender", sender, given.num_in);
    return given;
}

Tensor rc_forward(Tensor x, Tensor y, Tensor h, Tensor matrix, Tensor sender, Tensor spans, Maybe perm,
                  std::string spec) {
    const Given given = of_radial(x, y, h, matrix, sender, spans, perm);
    return or_empty(run_call(found(spec, given), "rc_forward", given), 'g', x);
}

std::tuple<Tensor, Tensor, Tensor> rc_backward(Tensor x, Tensor y, Tensor h, Tensor matrix, Tensor g, Tensor sender,
                                               Tensor spans, Maybe perm, std::string outputs, std::string spec) {
    Given given = of_radial(x, y, h, matrix, sender, spans, perm);
    given.operands[G] = g;
    const Found made = run_call(found(spec, given), "rc_backward " + outputs, given);
    return {or_empty(made, 'x', x), or_empty(made, 'y', x), or_empty(made, 'w', x)};
}

Tensor en_forward(Tensor x, Tensor fragments, Tensor scales, Tensor, Tensor, std::string spec) {
    const Operator& op = Packs::all().find(spec);
    const Json& widths = (*parts_of(op, "en_forward").front().facts)["widths"];
    return run_rows(op, "en_forward", {x, fragments, scales}, widths["g"].integer());
}

Tensor en_backward(Tensor x, Tensor g, Tensor fragments, Tensor scales, Tensor turned_fragments, Tensor turned_scales,
                   std::string spec) {
    const std::vector<Tensor> inputs{x, g, fragments, scales, turned_fragments, turned_scales};
    return run_rows(Packs::all().find(spec), "en_backward", inputs, x.size(1));
}

#define EQUITUNE_GRAPH                                                                                              \
    "Tensor? sender, Tensor? receiver, Tensor? spans, Tensor? perm, Tensor? sender_spans, Tensor? sender_perm, "   \
    "SymInt num_out"

}  // namespace

STABLE_TORCH_LIBRARY(equitune, m) {
    m.def("tp_forward(Tensor x, Tensor y, Tensor w, " EQUITUNE_GRAPH ", str spec) -> Tensor");
    m.def("tp_backward(Tensor x, Tensor y, Tensor w, Tensor g, " EQUITUNE_GRAPH
          ", str outputs, str spec) -> (Tensor, Tensor, Tensor)");
    m.def("tp_double_backward(Tensor x, Tensor y, Tensor w, Tensor g, Tensor? tx, Tensor? ty, Tensor? tw, "
          EQUITUNE_GRAPH ", str outputs, str spec) -> (Tensor, Tensor, Tensor, Tensor)");
    m.def("tp_order(Tensor nodes, SymInt num_out, SymInt count, str end, str spec) -> (Tensor, Tensor)");
    m.def("rc_forward(Tensor x, Tensor y, Tensor h, Tensor matrix, Tensor sender, Tensor spans, Tensor? perm, str spec) "
          "-> Tensor");
    m.def("rc_backward(Tensor x, Tensor y, Tensor h, Tensor matrix, Tensor g, Tensor sender, Tensor spans, Tensor? perm, "
          "str outputs, str spec) -> (Tensor, Tensor, Tensor)");
    m.def("en_forward(Tensor x, Tensor fragments, Tensor scales, Tensor turned_fragments, Tensor turned_scales, str spec) "
          "-> Tensor");
    m.def("en_backward(Tensor x, Tensor g, Tensor fragments, Tensor scales, Tensor turned_fragments, "
          "Tensor turned_scales, str spec) -> Tensor");
    m.def("sh_forward(Tensor v, str spec) -> Tensor");
    m.def("sh_backward(Tensor v, Tensor g, str spec) -> Tensor");
    m.def("sh_double_backward(Tensor v, Tensor g, Tensor t, str outputs, str spec) -> (Tensor, Tensor)");
    m.def("sc_forward(Tensor x, Tensor w, Tensor elements, str spec) -> Tensor");
    m.def("sc_backward(Tensor x, Tensor w, Tensor g, Tensor elements, str outputs, str spec) -> (Tensor, Tensor)");
    m.def("sc_double_backward(Tensor x, Tensor w, Tensor g, Tensor? tx, Tensor? tw, Tensor elements, str outputs, "
          "str spec) -> (Tensor, Tensor, Tensor)");
}

#define EQUITUNE_OPERATORS(m)                                   \
    m.impl("tp_forward", TORCH_BOX(&tp_forward));               \
    m.impl("tp_backward", TORCH_BOX(&tp_backward));             \
    m.impl("tp_double_backward", TORCH_BOX(&tp_double_backward)); \
    m.impl("tp_order", TORCH_BOX(&tp_order));                   \
    m.impl("rc_forward", TORCH_BOX(&rc_forward));               \
    m.impl("rc_backward", TORCH_BOX(&rc_backward));             \
    m.impl("en_forward", TORCH_BOX(&en_forward));               \
    m.impl("en_backward", TORCH_BOX(&en_backward));             \
    m.impl("sh_forward", TORCH_BOX(&sh_forward));               \
    m.impl("sh_backward", TORCH_BOX(&sh_backward));             \
    m.impl("sh_double_backward", TORCH_BOX(&sh_double_backward)); \
    m.impl("sc_forward", TORCH_BOX(&sc_forward));               \
    m.impl("sc_backward", TORCH_BOX(&sc_backward));             \
    m.impl("sc_double_backward", TORCH_BOX(&sc_double_backward))

STABLE_TORCH_LIBRARY_IMPL(equitune, CPU, m) { EQUITUNE_OPERATORS(m); }
STABLE_TORCH_LIBRARY_IMPL(equitune, CUDA, m) { EQUITUNE_OPERATORS(m); }

// Loads a pack beside those of $EQUITUNE_PACK; returns nullptr, or why it cannot be loaded (valid until the next call).
extern "C" __attribute__((visibility("default"))) const char* equitune_load_pack(const char* path) {
    static thread_local std::string reason;
    try {
        Packs::all().load(path);
        return nullptr;
    } catch (const std::exception& error) {
        reason = error.what();
        return reason.c_str();
    }
}
