// The collectives of torch's NCCL backend as those of gloo, for memory that `Own` moves to the host and back.
//
// Own::run(inputs, outputs, call, scale) calls gloo with copies of the inputs and with memory for the outputs, both on
// the host, and multiplies the outputs by `scale`.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

template <class Own>
class AsNccl : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  AsNccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(tensors, [&](auto& all) { return gloo_->broadcast(all, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return in_place(tensors, [&](auto& all) { return gloo_->allreduce(all, options); }, scale);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return in_place(tensors, [&](auto& all) { return gloo_->allreduce_coalesced(all, options); }, scale);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    return in_place(tensors, [&](auto& all) { return gloo_->reduce(all, options); }, scale);
  }
  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return own().run(inputs, outputs.at(0), [&](auto& in, auto& out) {
      std::vector<Tensors> lists{out};
      return gloo_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return own().run({input}, {output}, [&](auto& in, auto& out) { return gloo_->_allgather_base(out[0], in[0], options); });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return own().run(inputs, outputs, [&](auto& in, auto& out) {
      return gloo_->allgather_into_tensor_coalesced(out, in, options);
    });
  }
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    auto call = [&](auto& in, auto& out) { return gloo_->_reduce_scatter_base(out[0], in[0], options); };
    return own().run({input}, {output}, call, scale);
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& given) override {
    auto options = given;
    double scale = take_average(options);
    auto call = [&](auto& in, auto& out) { return gloo_->reduce_scatter_tensor_coalesced(out, in, options); };
    return own().run(inputs, outputs, call, scale);
  }
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return own().run(inputs.empty() ? Tensors{} : inputs[0], outputs, [&](auto& in, auto& out) {
      std::vector<Tensors> lists;
      if (!in.empty()) lists.push_back(in);
      return gloo_->scatter(out, lists, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return own().run({input}, {output}, [&](auto& in, auto& out) {
      return gloo_->alltoall_base(out[0], in[0], output_sizes, input_sizes, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& given) override {
    auto options = given;
    options.device_ids.clear();
    options.device.reset();
    return gloo_->barrier(options);
  }

 protected:
  c10::intrusive_ptr<c10d::Backend> gloo_;

 private:
  Own& own() { return static_cast<Own&>(*this); }

  template <class Run>
  WorkPtr in_place(const Tensors& tensors, Run call, double scale = 1) {
    return own().run(
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
};
