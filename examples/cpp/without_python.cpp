// The operators in a process without Python: called from C++, in a TorchScript
// model that learns, and in a model compiled ahead of time.
//
// usage: without_python FOLDER
//
// FOLDER is what prepare.py wrote: inputs.pt, layer.pt2, and scripted.pt unless
// its Python has no TorchScript. Writes outputs.pt, a dictionary of tensors for
// torch.load.

#include <ops/lltm.h>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using torch::Tensor;
using Tensors = c10::Dict<std::string, Tensor>;

Tensors read(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  TORCH_CHECK(stream, "without_python: expected to read ", file);
  const std::vector<char> bytes(
      std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>{});
  Tensors tensors;
  for (const auto& entry : torch::pickle_load(bytes).toGenericDict()) {
    tensors.insert(entry.key().toStringRef(), entry.value().toTensor());
  }
  return tensors;
}

void write(const std::string& file, const Tensors& tensors) {
  const auto bytes = torch::pickle_save(tensors);
  std::ofstream stream(file, std::ios::binary);
  stream.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(stream, "without_python: expected to write ", file);
}

// Through the dispatcher: autograd, autocast and all, on any device.
void call_operator(const Tensors& in, Tensors& out) {
  const auto [new_h, new_cell] = lltm::forward(
      {in.at("step"),
       in.at("weights"),
       in.at("bias"),
       in.at("old_h"),
       in.at("old_cell")});
  out.insert("new_h", new_h);
  out.insert("new_cell", new_cell);
}

Tensor run(torch::jit::Module& model, const Tensor& input) {
  return model.forward({input}).toTuple()->elements()[0].toTensor();
}

// Autograd of the operators is C++ too: a scripted model learns where it runs.
void train_scripted(const std::string& file, const Tensors& in, Tensors& out) {
  auto model = torch::jit::load(file);
  out.insert("scripted", run(model, in.at("input")));
  std::vector<Tensor> parameters;
  for (const auto& parameter : model.parameters()) {
    parameters.push_back(parameter);
  }
  torch::optim::SGD optimizer(parameters, /*lr=*/0.1);
  std::vector<Tensor> losses;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const auto loss =
        torch::mse_loss(run(model, in.at("input")), in.at("target"));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  out.insert("losses", torch::stack(losses));
  for (const auto& parameter : model.named_parameters()) {
    out.insert("trained." + parameter.name, parameter.value.detach());
  }
}

// Takes a time and a batch unlike those that the model was compiled with.
void run_compiled(const std::string& file, const Tensors& in, Tensors& out) {
  const c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(file);
  out.insert("compiled", model.run({in.at("input")})[0]);
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: without_python FOLDER\n";
    return 2;
  }
  const std::string folder = std::string(argv[1]) + "/";
  try {
    const auto in = read(folder + "inputs.pt");
    Tensors out;
    call_operator(in, out);
    if (const auto file = folder + "scripted.pt";
        std::filesystem::exists(file)) {
      train_scripted(file, in, out);
    }
    run_compiled(folder + "layer.pt2", in, out);
    write(folder + "outputs.pt", out);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
