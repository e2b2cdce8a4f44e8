// Collectives of the device: those of gloo, with the timing of NCCL.
//
// torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: a collective runs on a stream of its group, which first waits for
// the current stream. Work::wait makes the current stream wait for it, not the host. Only barrier waits on the host.
// The watchdog ends the process if a collective takes longer than the timeout of the group.
//
// Here gloo runs the collective during the call, on copies of the inputs, because a later one could block where NCCL
// does not. Its results reach the memory of the device when a wait requires them.
#pragma once

#include <cstdio>

#include "as_nccl.h"
#include "kernels.h"

namespace simulated {

struct CollectiveWork final : c10d::Work {
  MarkPtr done;
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> kept;  // inputs, until the wait, as in ProcessGroupNCCL's TensorShelf
  c10::intrusive_ptr<c10::ivalue::Future> future;

  void synchronize() override {
    Lock lock;
    check_device();
    if (done) wait_for(current_stream(current_device), done);
    outputs.clear();
    kept.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  bool isCompleted() override {
    Lock lock;
    if (done && !done->reached) run_next(done->stream);
    return !done || done->reached;
  }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class Collectives final : public AsNccl<Collectives> {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout)
      : AsNccl(std::move(gloo), rank, size), timeout_(timeout) {
    for (int device = 0; device < kMostDevices; ++device) streams_[device] = new_stream(device);
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    AsNccl::setTimeout(timeout);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    {
      Lock lock;
      host_waits(current_stream(current_device));
      check_device();
    }
    return AsNccl::barrier(options);
  }

  template <class Run>
  WorkPtr run(const Tensors& inputs, const Tensors& outputs, Run call, double scale = 1) {
    const int device = outputs.empty() ? current_device : outputs[0].device().index();
    const auto stream = streams_[device];
    bool hangs = false;
    Tensors in, out;
    {
      Lock lock;
      check_device();
      hangs = is_due(faults.collective);
      run_stream(current_stream(device));
      learn(clocks[stream], clocks[current_stream(device)]);
      Operation collective(stream, "a collective");
      for (auto& tensor : inputs) collective.reads(tensor);
      for (auto& tensor : outputs) collective.writes(tensor);
      BelowDispatch below;
      for (auto& tensor : inputs) in.push_back(host_view(tensor).contiguous().clone());
      for (auto& tensor : outputs)
        out.push_back(at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU)));
    }
    if (!hangs) call(in, out)->wait();  // without the lock: other threads of this process may be needed
    Lock lock;
    if (hangs) enqueue(stream, {[timeout = timeout_] { hang(timeout); }, nullptr, nullptr});
    std::vector<std::pair<at::Tensor, at::Tensor>> results;
    for (size_t i = 0; i < outputs.size(); ++i) {
      BelowDispatch below;
      if (scale != 1) out[i].mul_(scale);
      results.emplace_back(host_view(outputs[i]), out[i]);
      if (outputs[i].numel()) device_allocator.recordStream(outputs[i].storage().data_ptr(), as_stream(stream));
    }
    auto deliver = [results = std::move(results)] {
      for (auto& [memory, values] : results) copy_now(memory, values.view(memory.sizes()));
    };
    launch(stream, deliver, late_copies || hangs);
    auto work = c10::make_intrusive<CollectiveWork>();
    work->done = record(stream);
    work->outputs = outputs;
    work->kept = inputs;
    work->future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    work->future->markCompleted(c10::IValue(outputs));
    return work;
  }
 private:
  // A collective that never ends: whoever waits for it is ended by the watchdog.
  static void hang(std::chrono::milliseconds timeout) {
    auto sleep = [&] { std::this_thread::sleep_for(timeout); };
    if (Py_IsInitialized() && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      sleep();
    } else {
      sleep();
    }
    fprintf(
        stderr, "Watchdog caught collective operation timeout: it ran for %lld milliseconds (simulated)\n",
        static_cast<long long>(timeout.count()));
    fflush(stderr);
    std::abort();
  }

  std::chrono::milliseconds timeout_;
  StreamId streams_[kMostDevices];
};

}  // namespace simulated
