// Collectives of the device: those of gloo, with the timing of NCCL.
//
// torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp: a collective runs on a stream of its group, which first waits for
// the current stream. Work::wait makes the current stream wait for it, not the host. Only barrier waits on the host.
// The watchdog ends the process if a collective takes longer than the timeout of the group.
//
// Here gloo runs the collective during the call, on copies of the inputs, because a later one could block where NCCL
// does not. Its results reach the memory of the device when a wait requires them.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstdio>

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

class Collectives final : public c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), gloo_(std::move(gloo)), timeout_(timeout) {
    for (int device = 0; device < kMostDevices; ++device) streams_[device] = new_stream(device);
  }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    timeout_ = timeout;
    gloo_->setTimeout(timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run_in_place(tensors, [&](auto& all) { return gloo_->broadcast(all, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return run_in_place(tensors, [&](auto& all) { return gloo_->allreduce(all, options); }, scale);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return run_in_place(tensors, [&](auto& all) { return gloo_->allreduce_coalesced(all, options); }, scale);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return run_in_place(tensors, [&](auto& all) { return gloo_->reduce(all, options); }, scale);
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, outputs.at(0), [&](auto& in, auto& out) {
      std::vector<Tensors> lists{out};
      return gloo_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return run({input}, {output}, [&](auto& in, auto& out) { return gloo_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return run(inputs, outputs, [&](auto& in, auto& out) {
      return gloo_->allgather_into_tensor_coalesced(out, in, options);
    });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    auto call = [&](auto& in, auto& out) { return gloo_->_reduce_scatter_base(out[0], in[0], options); };
    return run({input}, {output}, call, scale);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    auto call = [&](auto& in, auto& out) { return gloo_->reduce_scatter_tensor_coalesced(out, in, options); };
    return run(inputs, outputs, call, scale);
  }
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return run(inputs.empty() ? Tensors{} : inputs[0], outputs, [&](auto& in, auto& out) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      return gloo_->scatter(out, lists, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return run({input}, {output}, [&](auto& in, auto& out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& given) override {
    {
      Lock lock;
      host_waits(current_stream(current_device));
      check_device();
    }
    auto options = given;
    options.device_ids.clear();
    options.device.reset();
    return gloo_->barrier(options);
  }

 private:
  // Call gloo with copies of the inputs and with memory for the outputs, both on the host.
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
  template <class Run>
  WorkPtr run_in_place(const Tensors& tensors, Run call, double scale = 1) {
    return run(
        tensors, tensors,
        [&](auto& in, auto& out) {
          out = in;
          return call(out);
        },
        scale);
  }

  // gloo has no average. Sum, and return the factor for the result.
  template <class Options>
  double take_average(Options& options) const {
    if (options.reduceOp != c10d::ReduceOp::AVG) return 1;
    options.reduceOp = c10d::ReduceOp::SUM;
    return 1.0 / getSize();
  }

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

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::chrono::milliseconds timeout_;
  StreamId streams_[kMostDevices];
};

}  // namespace simulated
