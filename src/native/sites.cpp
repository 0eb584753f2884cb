// Per-trajectory gradients from one batched graph: walks the autograd graph from the logits, finds
// where each parameter is used, keeps what the use multiplied it with, and captures the gradient that
// arrives there. As in shim.cpp, no exception leaves this file, and tensors are handed over as
// `new at::Tensor`. Builds on libtorch 2.11 to 2.13: nodes are held by `auto`, since their smart
// pointer changed its type.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace autograd = torch::autograd;
namespace generated = torch::autograd::generated;

namespace {

// How the gradient of a parameter follows from the input and the arriving gradient δ of a use.
enum Use : int {
  kLinear = 0,       // y = x M, M the parameter or its transpose: xᵀδ or δᵀx
  kEmbedding = 1,    // y = rows of the parameter: δ added at the rows
  kElementwise = 2,  // y = x ∘ w over the last dimension: Σ δ ∘ x
  kBias = 3,         // y = x + w over the last dimension: Σ δ
};

struct Site {
  Use use;
  int64_t parameter;
  bool transposed;
  int64_t padding_idx;
  at::Tensor input;
  std::shared_ptr<at::Tensor> delta = std::make_shared<at::Tensor>();
};

struct Sites {
  std::vector<Site> found;
  std::set<int64_t> uncovered;
};

class Capture : public autograd::FunctionPreHook {
 public:
  explicit Capture(std::shared_ptr<at::Tensor> slot) : slot_(std::move(slot)) {}
  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    *slot_ = gradients[0].defined() ? gradients[0].detach() : at::Tensor();
    return gradients;
  }

 private:
  std::shared_ptr<at::Tensor> slot_;
};

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
      // What a transpose of a parameter is used for is seen from its user.
      if (!is_transpose(*node)) visit(node);
    }
    return std::move(sites_);
  }

 private:
  static bool is_transpose(const autograd::Node& node) { return node.name() == "TBackward0"; }

  // The parameter that an edge ends in, straight or through transposes; -1 if none.
  int64_t parameter_of(const autograd::Edge& edge, bool* transposed) const {
    *transposed = false;
    auto node = edge.function;
    while (node && is_transpose(*node)) {
      *transposed = !*transposed;
      node = node->next_edge(0).function;
    }
    auto leaf = dynamic_cast<autograd::AccumulateGrad*>(node.get());
    if (leaf == nullptr) return -1;
    auto known = index_.find(leaf->variable.unsafeGetTensorImpl());
    return known == index_.end() ? -1 : static_cast<int64_t>(known->second);
  }

  template <typename NodePtr>
  void visit(const NodePtr& node) {
    for (size_t i = 0; i < node->num_outputs(); ++i) {
      bool transposed = false;
      const int64_t parameter = parameter_of(node->next_edge(i), &transposed);
      if (parameter < 0) continue;
      Site site{kLinear, parameter, transposed, -1, at::Tensor()};
      if (!describe(node, i, &site)) {
        sites_.uncovered.insert(parameter);
        continue;
      }
      node->add_pre_hook(std::make_unique<Capture>(site.delta));
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
      if (edge == 0) {
        site->use = kBias;
        return !site->transposed;
      }
      if (edge != 2) return false;
      site->input = addmm->mat1_.unpack();
      return site->input.defined();
    }
    if (auto* embedding = dynamic_cast<generated::EmbeddingBackward0*>(node.get())) {
      if (site->transposed || embedding->scale_grad_by_freq || embedding->sparse) return false;
      site->use = kEmbedding;
      site->padding_idx = embedding->padding_idx.expect_int();
      site->input = embedding->indices_.unpack();
      return true;
    }
    if (auto* norm = dynamic_cast<generated::NativeLayerNormBackward0*>(node.get())) {
      if (norm->normalized_shape.size() != 1 || site->transposed) return false;
      if (edge == 2) {
        site->use = kBias;
        return true;
      }
      if (edge != 1) return false;
      site->use = kElementwise;
      site->input = (norm->input_.unpack() - norm->result1_.unpack(node)) * norm->result2_.unpack(node);
      return true;
    }
    if (auto* mul = dynamic_cast<generated::MulBackward0*>(node.get())) {
      if (site->transposed) return false;
      site->use = kElementwise;
      site->input = edge == 0 ? mul->other_.unpack() : mul->self_.unpack();
      return site->input.defined();
    }
    return false;
  }

  std::unordered_map<const c10::TensorImpl*, size_t> index_;
  Sites sites_;
};

}  // namespace

extern "C" {

// Finds the uses of `parameters` between them and `root`, and arms a capture at each.
char* gp_sites_find(const at::Tensor* root, at::Tensor* const* parameters, size_t count, Sites** out) {
  try {
    torch::NoGradGuard no_grad;
    *out = new Sites(Walk(parameters, count).run(*root));
    return nullptr;
  } catch (const c10::Error& error) {
    return strdup(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return strdup(error.what());
  }
}

void gp_sites_free(Sites* sites) { delete sites; }

size_t gp_sites_count(const Sites* sites) { return sites->found.size(); }

void gp_site_describe(const Sites* sites, size_t at, int* use, int64_t* parameter, int* transposed,
                      int64_t* padding_idx) {
  const Site& site = sites->found[at];
  *use = site.use;
  *parameter = site.parameter;
  *transposed = site.transposed;
  *padding_idx = site.padding_idx;
}

// Hands over the input (none for a bias) and the captured gradient (none if none arrived), and lets
// go of both.
void gp_site_take(Sites* sites, size_t at, at::Tensor** input, at::Tensor** delta) {
  Site& site = sites->found[at];
  *input = site.input.defined() ? new at::Tensor(std::move(site.input)) : nullptr;
  *delta = site.delta->defined() ? new at::Tensor(std::move(*site.delta)) : nullptr;
  site.input = at::Tensor();
  *site.delta = at::Tensor();
}

size_t gp_sites_uncovered(const Sites* sites, int64_t* out, size_t capacity) {
  size_t written = 0;
  for (int64_t parameter : sites->uncovered) {
    if (written < capacity) out[written] = parameter;
    ++written;
  }
  return written;
}

}  // extern "C"
