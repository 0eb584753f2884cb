// What tch does not expose of a TorchScript module: the signature of its forward, its buffers, the
// identity of its tied weights, and calls by argument name. Functions that can fail are guarded.
// Tensors are handed over as `new at::Tensor`, which is what tch owns and frees.
#include "guarded.h"

#include <ATen/Context.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/export.h>
#include <torch/script.h>
#include <torch/version.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

using torch::jit::Module;
using EmitArgument = void (*)(void* context, const char* name, const char* type, int has_default);
using EmitTensor = void (*)(void* context, const char* name, at::Tensor* owned);
using EmitBytes = void (*)(void* context, const void* bytes, size_t count);

namespace {

// A weight used under several names is stored once, but may be loaded as several tensors over the
// same memory. Makes them one tensor, so that it has one gradient and is moved and cast once.
void unify_tied_parameters(Module& module) {
  using Key = std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>>;
  std::map<Key, at::Tensor> first;
  for (auto submodule : module.modules()) {
    for (const auto& parameter : submodule.named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value;
      if (tensor.numel() == 0) continue;
      auto [found, is_new] = first.emplace(
          Key{tensor.const_data_ptr(), tensor.sizes().vec(), tensor.strides().vec()}, tensor);
      if (is_new || found->second.is_same(tensor)) continue;
      if (tensor.requires_grad()) found->second.requires_grad_(true);
      submodule.setattr(parameter.name, found->second);
    }
  }
}

void emit_tensors(const c10::IValue& value, const std::string& path, void* context, EmitTensor emit) {
  auto child = [&](const std::string& name) { return path.empty() ? name : path + "." + name; };
  if (value.isTensor()) {
    if (value.toTensor().defined()) emit(context, path.c_str(), new at::Tensor(value.toTensor()));
  } else if (value.isTuple()) {
    const auto& elements = value.toTupleRef().elements();
    // A named tuple keeps the names of its fields in its type.
    const auto schema = value.toTupleRef().type()->schema();
    for (size_t i = 0; i < elements.size(); ++i) {
      const bool named = schema != nullptr && i < schema->arguments().size();
      emit_tensors(elements[i], child(named ? schema->arguments()[i].name() : std::to_string(i)),
                   context, emit);
    }
  } else if (value.isList()) {
    const auto list = value.toListRef();
    for (size_t i = 0; i < list.size(); ++i) {
      emit_tensors(list[i], child(std::to_string(i)), context, emit);
    }
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) {
      if (item.key().isString()) {
        emit_tensors(item.value(), child(item.key().toStringRef()), context, emit);
      }
    }
  }
}

}  // namespace

extern "C" {

// The libtorch whose headers this was compiled with.
const char* gp_libtorch_version() { return TORCH_VERSION; }

void gp_free_message(char* message) { std::free(message); }

char* gp_module_load(const char* path, const char* device, Module** out) {
  return guarded([&] {
    auto module = torch::jit::load(path, c10::Device(device));
    unify_tied_parameters(module);
    *out = new Module(std::move(module));
  });
}

void gp_module_free(Module* module) { delete module; }

char* gp_module_set_training(Module* module, int training) {
  return guarded([&] { module->train(training != 0); });
}

int gp_module_is_training(const Module* module) {
  // A frozen module has no such flag.
  auto flag = module->hasattr("training") ? module->attr("training") : c10::IValue(false);
  return flag.isBool() && flag.toBool();
}

// The arguments of a method, self left out, and then its result, under an empty name; nothing if there
// is no such method.
char* gp_module_signature(const Module* module, const char* name, void* context, EmitArgument emit) {
  return guarded([&] {
    auto method = module->find_method(name);
    if (!method.has_value()) return;
    const auto& schema = method->function().getSchema();
    const auto& arguments = schema.arguments();
    for (size_t i = 1; i < arguments.size(); ++i) {
      emit(context, arguments[i].name().c_str(), arguments[i].type()->annotation_str().c_str(),
           arguments[i].default_value().has_value());
    }
    const bool has_result = !schema.returns().empty();
    emit(context, "", has_result ? schema.returns()[0].type()->annotation_str().c_str() : "None", 0);
  });
}

// Parameters or buffers with their dotted names; a tied weight comes once a name.
char* gp_module_tensors(const Module* module, int buffers, void* context, EmitTensor emit) {
  return guarded([&] {
    if (buffers) {
      for (const auto& named : module->named_buffers()) {
        emit(context, named.name.c_str(), new at::Tensor(named.value));
      }
    } else {
      for (const auto& named : module->named_parameters()) {
        emit(context, named.name.c_str(), new at::Tensor(named.value));
      }
    }
  });
}

// Casts the floating-point parameters and buffers only: Module::to would turn integer buffers,
// position ids for one, into floats.
char* gp_module_cast(Module* module, int scalar_type) {
  return guarded([&] {
    torch::NoGradGuard no_grad;
    auto cast = [&](at::Tensor tensor) {
      if (tensor.is_floating_point()) {
        tensor.set_data(tensor.to(static_cast<at::ScalarType>(scalar_type)));
      }
    };
    for (auto tensor : module->parameters()) cast(tensor);
    for (auto tensor : module->buffers()) cast(tensor);
  });
}

// Calls forward by argument names. With `optimize` off the graph executor neither profiles nor
// fuses, so that autograd records plain nodes; the flag is the thread's and is put back.
char* gp_module_forward(Module* module, const char* const* names, at::Tensor* const* inputs,
                        size_t count, int optimize, void* context, EmitTensor emit) {
  return guarded([&] {
    torch::jit::GraphOptimizerEnabledGuard guard(optimize != 0);
    torch::jit::Kwargs arguments;
    for (size_t i = 0; i < count; ++i) arguments.emplace(names[i], *inputs[i]);
    emit_tensors(module->forward({}, arguments), "", context, emit);
  });
}

// Calls forward_cached, whose schema has been looked at: emits the logits, then the cache in order. The
// executor is that of forward.
char* gp_module_forward_cached(Module* module, const at::Tensor* const* inputs, const at::Tensor* const* cache,
                               size_t count, int optimize, void* context, EmitTensor emit) {
  return guarded([&] {
    torch::jit::GraphOptimizerEnabledGuard guard(optimize != 0);
    c10::List<at::Tensor> seen;
    seen.reserve(count);
    for (size_t i = 0; i < count; ++i) seen.push_back(*cache[i]);
    emit_tensors(module->get_method("forward_cached")({*inputs[0], *inputs[1], *inputs[2], seen}), "",
                 context, emit);
  });
}

// Hands out the bytes of the module's file, front to back. Tensors are read as they are now, and one
// storage is written once, so that tied weights stay tied. The receiver cannot fail: libtorch's writer
// would throw in its destructor.
char* gp_module_save(const Module* module, void* context, EmitBytes emit) {
  return guarded([&] {
    torch::jit::ExportModule(*module, [&](const void* bytes, size_t count) {
      emit(context, bytes, count);
      return count;
    });
  });
}

// The state of a device's default random generator, as torch.get_rng_state gives it.
char* gp_generator_state(const char* device, at::Tensor** out) {
  return guarded([&] {
    at::Generator generator = at::globalContext().defaultGenerator(c10::Device(device));
    std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

char* gp_set_generator_state(const char* device, const at::Tensor* state) {
  return guarded([&] {
    at::Generator generator = at::globalContext().defaultGenerator(c10::Device(device));
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*state);
  });
}

}  // extern "C"
