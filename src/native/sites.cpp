// Per-trajectory gradients from one batched graph: walks the autograd graph from the logits, finds
// where each parameter is used, keeps what the use multiplied it with, and runs backward passes that
// stop at the gradients which arrive there. As in shim.cpp, no exception leaves this file, and tensors
// are handed over as `new at::Tensor`. Builds on libtorch 2.11 to 2.13: nodes are held by `auto` and in
// edges, since their smart pointer changed its type.
#include "guarded.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/torch.h>

#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace autograd = torch::autograd;
namespace generated = torch::autograd::generated;

namespace {

// How the gradient of a parameter follows from the input and the arriving gradient δ of a use.
enum Use : int {
  kLinear = 0,       // y = x W: xᵀδ
  kEmbedding = 1,    // y = rows of W: δ added at the rows
  kElementwise = 2,  // y = x ∘ W, broadcast: δ ∘ x, summed to the shape of W
  kBias = 3,         // y = x + W, broadcast: δ, summed to the shape of W
  kBatched = 4,      // y_e = x_e W_e for every e of the first dimension: x_eᵀδ_e
  kConvolution = 5,  // y = x * W, over one or two dimensions
  kChannelBias = 6,  // the bias of that: δ, summed over all but the second dimension
};

// How the gradient of W, what a use sees, lies in that of the parameter, which W is a view of.
enum Layout : int { kSame = 0, kTransposed = 1, kOther = 2 };

struct Site {
  Use use = kLinear;
  Layout layout = kSame;
  int64_t parameter = -1;
  // Where the gradient arrives, and from where W leads back to the parameter.
  autograd::Edge arrives;
  autograd::Edge view;
  std::vector<int64_t> view_sizes;
  // Of an embedding the padding row; of a convolution strides, paddings, dilations, groups.
  std::vector<int64_t> numbers;
  at::Tensor input;
  size_t slot = 0;
};

struct Sites {
  std::vector<Site> found;
  std::set<int64_t> uncovered;
  // Where gradients are captured, and what the last pass left there.
  autograd::edge_list slots;
  std::vector<at::Tensor> deltas;
};

const std::unordered_set<std::string>& views() {
  static const std::unordered_set<std::string> names{
      "TBackward0",         "TransposeBackward0", "PermuteBackward0",   "ViewBackward0",
      "ReshapeAliasBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
      "SqueezeBackward1",   "AliasBackward0",     "ExpandBackward0",    "SliceBackward0",
      "SelectBackward0",    "SplitBackward0",     "SplitWithSizesBackward0"};
  return names;
}

bool is_view(const autograd::Node& node) { return views().count(node.name()) != 0; }

std::vector<int64_t> sizes_at(const autograd::Edge& edge) {
  if (auto leaf = dynamic_cast<autograd::AccumulateGrad*>(edge.function.get())) {
    return leaf->variable.sizes().vec();
  }
  const auto sizes = edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
  return C10_AS_INTARRAYREF_SLOW(sizes).vec();
}

// Takes a gradient of W back through the views to one of the parameter.
at::Tensor pull_back(autograd::Edge edge, at::Tensor gradient) {
  while (dynamic_cast<autograd::AccumulateGrad*>(edge.function.get()) == nullptr) {
    autograd::variable_list gradients(edge.function->num_inputs());
    gradients[edge.input_nr] = gradient;
    gradient = (*edge.function)(std::move(gradients))[0];
    edge = edge.function->next_edge(0);
  }
  return gradient;
}

// Told without memory: strides say where a view keeps an element. What a view leaves out, repeats or
// copies is no relabelling of elements.
Layout layout_of(const autograd::Edge& view, const std::vector<int64_t>& sizes) {
  bool transposed = false;
  autograd::Edge edge = view;
  for (; edge.function->name() == "TBackward0"; edge = edge.function->next_edge(0)) {
    transposed = !transposed;
  }
  if (dynamic_cast<autograd::AccumulateGrad*>(edge.function.get()) != nullptr) {
    return transposed ? kTransposed : kSame;
  }
  auto start = at::empty(sizes, at::TensorOptions(at::kMeta));
  auto end = pull_back(view, start);
  if (!end.is_alias_of(start) || end.numel() != start.numel()) return kOther;
  if (end.is_contiguous()) return kSame;
  const bool is_transposed = end.dim() == 2 && end.stride(0) == 1 && end.stride(1) == end.size(0);
  return is_transposed ? kTransposed : kOther;
}

class Walk {
 public:
  Walk(at::Tensor* const* parameters, size_t count) {
    for (size_t i = 0; i < count; ++i) index_[parameters[i]->unsafeGetTensorImpl()] = i;
  }

  Sites run(const at::Tensor& root) {
    std::vector<autograd::Edge> open{autograd::impl::gradient_edge(root)};
    std::unordered_set<autograd::Node*> seen;
    while (!open.empty()) {
      auto node = open.back().function;
      open.pop_back();
      if (!node || !seen.insert(node.get()).second) continue;
      for (const auto& edge : node->next_edges()) open.push_back(edge);
      // What a view of a parameter is used for is seen from its user.
      if (!is_view(*node)) visit(node);
    }
    return std::move(sites_);
  }

 private:
  // The parameter that an edge ends in, straight or through views; -1 if none.
  int64_t parameter_of(autograd::Edge edge) const {
    while (edge.function && is_view(*edge.function)) edge = edge.function->next_edge(0);
    auto leaf = dynamic_cast<autograd::AccumulateGrad*>(edge.function.get());
    if (leaf == nullptr) return -1;
    auto known = index_.find(leaf->variable.unsafeGetTensorImpl());
    return known == index_.end() ? -1 : static_cast<int64_t>(known->second);
  }

  template <typename NodePtr>
  void visit(const NodePtr& node) {
    for (size_t i = 0; i < node->num_outputs(); ++i) {
      Site site;
      site.view = node->next_edge(i);
      site.parameter = parameter_of(site.view);
      if (site.parameter < 0) continue;
      site.arrives = autograd::Edge(node, 0);
      if (!describe(node, i, &site)) {
        sites_.uncovered.insert(site.parameter);
        continue;
      }
      site.view_sizes = sizes_at(site.view);
      site.layout = layout_of(site.view, site.view_sizes);
      auto [slot, is_new] = slots_.emplace(node.get(), sites_.slots.size());
      if (is_new) sites_.slots.push_back(site.arrives);
      site.slot = slot->second;
      sites_.found.push_back(std::move(site));
    }
  }

  // Fills in the use and its input; false where the edge is no use that is known.
  template <typename NodePtr>
  static bool describe(const NodePtr& node, size_t edge, Site* site) {
    if (auto* mm = dynamic_cast<generated::MmBackward0*>(node.get())) {
      if (edge != 1) return false;
      site->input = mm->self_.unpack();
      return site->input.defined();
    }
    if (auto* addmm = dynamic_cast<generated::AddmmBackward0*>(node.get())) {
      if (addmm->alpha.toDouble() != 1.0 || addmm->beta.toDouble() != 1.0) return false;
      if (edge == 0) site->use = kBias;
      if (edge == 2) site->input = addmm->mat1_.unpack();
      return edge == 0 || (edge == 2 && site->input.defined());
    }
    if (auto* bmm = dynamic_cast<generated::BmmBackward0*>(node.get())) {
      if (edge != 1) return false;
      site->input = bmm->self_.unpack();
      if (!site->input.defined()) return false;
      // One matrix for the whole batch is a linear layer over all of its rows.
      if (site->view.function->name() == "ExpandBackward0") {
        auto before = site->view.function->next_edge(0);
        const auto sizes = sizes_at(before);
        if (sizes.size() < 3 || sizes[0] == 1) site->view = before;
      }
      const auto sizes = sizes_at(site->view);
      site->use = sizes.size() < 3 || sizes[0] == 1 ? kLinear : kBatched;
      return true;
    }
    if (auto* embedding = dynamic_cast<generated::EmbeddingBackward0*>(node.get())) {
      if (embedding->scale_grad_by_freq || embedding->sparse) return false;
      site->use = kEmbedding;
      site->numbers = {embedding->padding_idx.expect_int()};
      site->input = embedding->indices_.unpack();
      return true;
    }
    if (auto* norm = dynamic_cast<generated::NativeLayerNormBackward0*>(node.get())) {
      if (edge == 2) site->use = kBias;
      if (edge == 1) {
        site->use = kElementwise;
        site->input =
            (norm->input_.unpack() - norm->result1_.unpack(node)) * norm->result2_.unpack(node);
      }
      return edge != 0;
    }
    if (auto* norm = dynamic_cast<generated::FusedRmsNormBackward0*>(node.get())) {
      if (edge != 1) return false;
      site->use = kElementwise;
      site->input = norm->input_.unpack() * norm->result1_.unpack(node);
      return true;
    }
    if (auto* mul = dynamic_cast<generated::MulBackward0*>(node.get())) {
      site->use = kElementwise;
      site->input = edge == 0 ? mul->other_.unpack() : mul->self_.unpack();
      return site->input.defined();
    }
    if (auto* add = dynamic_cast<generated::AddBackward0*>(node.get())) {
      site->use = kBias;
      return edge == 0 || add->alpha.toDouble() == 1.0;
    }
    if (auto* convolution = dynamic_cast<generated::ConvolutionBackward0*>(node.get())) {
      return describe_convolution(*convolution, edge, site);
    }
    return false;
  }

  template <typename Convolution>
  static bool describe_convolution(const Convolution& node, size_t edge, Site* site) {
    if (edge == 2) {
      site->use = kChannelBias;
      return true;
    }
    if (edge != 1 || node.transposed || node.stride.size() > 2) return false;
    site->use = kConvolution;
    for (const auto* numbers : {&node.stride, &node.padding, &node.dilation}) {
      for (const auto& number : *numbers) site->numbers.push_back(number.expect_int());
    }
    site->numbers.push_back(node.groups.expect_int());
    site->input = node.input_.unpack();
    return site->input.defined();
  }

  std::unordered_map<const c10::TensorImpl*, size_t> index_;
  std::unordered_map<const autograd::Node*, size_t> slots_;
  Sites sites_;
};

at::Tensor* owned(at::Tensor tensor) {
  return tensor.defined() ? new at::Tensor(std::move(tensor)) : nullptr;
}

}  // namespace

extern "C" {

// Finds the uses of `parameters` between them and `root`.
char* gp_sites_find(const at::Tensor* root, at::Tensor* const* parameters, size_t count, Sites** out) {
  return guarded([&] {
    torch::NoGradGuard no_grad;
    *out = new Sites(Walk(parameters, count).run(*root));
  });
}

void gp_sites_free(Sites* sites) { delete sites; }

size_t gp_sites_count(const Sites* sites) { return sites->found.size(); }

void gp_site_describe(const Sites* sites, size_t at, int* use, int* layout, int64_t* parameter) {
  const Site& site = sites->found[at];
  *use = site.use;
  *layout = site.layout;
  *parameter = site.parameter;
}

// The sizes of W, or the numbers of the use; returns how many there are.
size_t gp_site_numbers(const Sites* sites, size_t at, int sizes, int64_t* out, size_t capacity) {
  const Site& site = sites->found[at];
  const auto& numbers = sizes ? site.view_sizes : site.numbers;
  for (size_t i = 0; i < numbers.size() && i < capacity; ++i) out[i] = numbers[i];
  return numbers.size();
}

size_t gp_sites_uncovered(const Sites* sites, int64_t* out, size_t capacity) {
  size_t written = 0;
  for (int64_t parameter : sites->uncovered) {
    if (written < capacity) out[written] = parameter;
    ++written;
  }
  return written;
}

// A backward pass from `root`, at which `gradient` arrives, as far as the uses; and as far as `extra`
// parameters, whose whole gradients go to `out` (null where none arrives).
char* gp_sites_backward(Sites* sites, const at::Tensor* root, const at::Tensor* gradient, int keep_graph,
                        at::Tensor* const* extra, size_t count, at::Tensor** out) {
  return guarded([&] {
    sites->deltas.clear();
    autograd::edge_list outputs = sites->slots;
    for (size_t i = 0; i < count; ++i) outputs.push_back(autograd::impl::gradient_edge(*extra[i]));
    const auto start = autograd::impl::gradient_edge(*root);
    if (outputs.empty() || !start.function) return;
    auto gradients = autograd::Engine::get_default_engine().execute(
        {start}, {*gradient}, keep_graph != 0, /*create_graph=*/false, /*accumulate_grad=*/false, outputs);
    for (size_t i = 0; i < count; ++i) out[i] = owned(std::move(gradients[sites->slots.size() + i]));
    gradients.resize(sites->slots.size());
    sites->deltas = std::move(gradients);
  });
}

// The input of a use (none for a bias) and the gradient that the last pass left there (none if none
// arrived). With `last` the input is let go of.
void gp_site_take(Sites* sites, size_t at, int last, at::Tensor** input, at::Tensor** delta) {
  Site& site = sites->found[at];
  *input = owned(site.input);
  if (last) site.input = at::Tensor();
  *delta = site.slot < sites->deltas.size() ? owned(sites->deltas[site.slot]) : nullptr;
}

// Takes a gradient of the shape of W back to the shape of the parameter.
char* gp_site_pull_back(const Sites* sites, size_t at, const at::Tensor* gradient, at::Tensor** out) {
  return guarded([&] {
    torch::NoGradGuard no_grad;
    *out = owned(pull_back(sites->found[at].view, *gradient));
  });
}

}  // extern "C"
