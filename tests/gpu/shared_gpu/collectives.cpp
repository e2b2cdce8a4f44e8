// Collectives of NCCL's interface for ranks that share a GPU, which NCCL refuses: gloo, on copies in host memory.
//
// A call waits for the current stream, runs the collective, and copies its results back on the current stream.
#include <torch/csrc/utils/pybind.h>

#include "../../simulated_cuda/csrc/as_nccl.h"

namespace {

struct Done final : c10d::Work {
  std::vector<at::Tensor> outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  void synchronize() override {}
  bool wait(std::chrono::milliseconds) override { return true; }
  void blockCurrentStream() override {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class Collectives final : public AsNccl<Collectives> {
 public:
  using AsNccl::AsNccl;

  template <class Run>
  WorkPtr run(const Tensors& inputs, const Tensors& outputs, Run call, double scale = 1) {
    at::NoGradGuard no_grad;
    Tensors in, out;
    for (auto& tensor : inputs) in.push_back(tensor.detach().to(at::kCPU).contiguous().clone());
    for (auto& tensor : outputs)
      out.push_back(at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU)));
    call(in, out)->wait();
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (scale != 1) out[i].mul_(scale);
      outputs[i].detach().copy_(out[i].view(outputs[i].sizes()));
    }
    auto work = c10::make_intrusive<Done>();
    work->outputs = outputs;
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def("_group_start", [](Collectives&) {})  // around the aborts of several groups, in NCCL
      .def("_group_end", [](Collectives&) {});
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) {
    return c10::make_intrusive<Collectives>(std::move(gloo), rank, size);
  });
}
