// Operators on the device: copies, views, and one kernel for everything else.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_map>

#include "device.h"

namespace simulated {

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kDevice; }

// A CPU tensor on the memory of a device tensor. It does not keep the memory alive, as a pointer in a kernel does not.
inline at::Tensor host_view(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  auto view = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// Calls on host views must not reach autograd, or Python's dispatch modes, a second time.
struct BelowDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};
inline void copy_now(const at::Tensor& to, const at::Tensor& from) {
  BelowDispatch below;
  at::Tensor target = to;
  at::native::copy_(target, from, false);
}

// ---- copies
//
// CUDA Runtime API, "API synchronization behavior", and ATen/native/cuda/Copy.cu:
// - A copy runs in the current stream of its device. Between devices it returns before it is done. With the host it does
//   so only if it is non_blocking. Otherwise torch waits for the stream.
// - From pageable memory the values are staged before the call returns, so that the memory may change afterwards.
// - To pageable memory the call returns when the copy is done.
// - Host memory that is not contiguous is copied through contiguous pageable memory.
// - A copy between devices runs in the source's current stream, and both current streams wait for each other.

// A copy for a stream. The one that an injected fault chooses loses the device when it runs: later calls fail.
inline std::function<void()> copy_work(const at::Tensor& to, const at::Tensor& from) {
  return [to, from, loses_device = is_due(faults.copy)] {
    if (loses_device) device_lost = true;
    else copy_now(to, from);
  };
}

inline void copy_between_devices(const at::Tensor& to, const at::Tensor& from) {
  auto source = current_stream(from.device().index()), target = current_stream(to.device().index());
  if (source != target) wait_for(source, record(target));
  Operation copy(source, "a copy");
  copy.reads(from);
  copy.writes(to);
  launch(source, copy_work(host_view(to), host_view(from)), late_copies);
  if (source != target) wait_for(target, record(source));
}

inline at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (!to.numel()) return to;
  Lock lock;
  check_device();
  auto source = from.expand(to.sizes());
  if (on_device(to) && on_device(from)) {
    copy_between_devices(to, source);
    return to;
  }
  auto stream = current_stream((on_device(to) ? to : from).device().index());
  Operation copy(stream, on_device(to) ? "a copy from the host" : "a copy to the host");
  copy.reads(from);
  copy.writes(to);
  auto& host = on_device(to) ? from : to;
  bool async = non_blocking && host.is_contiguous() && is_pinned(host.const_data_ptr());
  if (on_device(from)) {
    launch(stream, copy_work(host_view(to), host_view(source)), late_copies && async);
  } else {
    auto values = async ? host_view(source) : source.clone();
    launch(stream, copy_work(host_view(to), values), late_copies && non_blocking);
  }
  if (!non_blocking || (on_device(from) && !async)) {
    learn(host_clock, clocks[stream]);
    check_device();
  }
  if (async) used_by_copy(host.const_data_ptr(), stream);
  return to;
}

inline at::Scalar local_scalar_dense(const at::Tensor& self) {  // cuda/CUDAScalar.cu: copy, and wait for the stream
  Lock lock;
  const auto stream = current_stream(self.device().index());
  Operation(stream, "item()").reads(self);
  host_waits(stream);
  check_device();
  return at::native::_local_scalar_dense_cpu(host_view(self));
}

// ---- memory and views

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}
inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
// As ATen/native/cuda/Resize.cpp: the old values are copied in the current stream.
inline void resize_storage(c10::StorageImpl& storage, size_t n_bytes) {
  c10::DeviceGuard guard(storage.device());
  Lock lock;
  auto grown = device_allocator.allocate(n_bytes);
  if (auto kept = std::min(n_bytes, storage.nbytes())) {
    auto copy = [to = grown.get(), from = storage.data(), kept] { memcpy(to, from, kept); };
    launch(current_stream(current_device), copy, late_copies);
  }
  storage.set_data_ptr_noswap(std::move(grown));
  storage.set_nbytes(n_bytes);
}
inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto n_elements = c10::multiply_integers(size);
  size_t n_bytes = (self.storage_offset() + n_elements) * self.itemsize();
  if (n_elements && n_bytes > self.storage().nbytes())
    resize_storage(*impl->unsafe_storage().unsafeGetStorageImpl(), n_bytes);
  impl->set_sizes_contiguous(size);
  return self;
}
inline at::Tensor& set_strided(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return set_strided(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.itemsize())}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
inline void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator.recordStream(self.storage().data_ptr(), stream);
}

// ---- every other operator
//
// A kernel runs the CPU's operator on the same memory, in the current stream of its device: all earlier work of this
// stream runs first. With late kernels its results reach memory when the next wait requires them, so that a reader
// that does not wait finds the values of before, or poison.

// Numbers from the device's generator for an operator that takes them from the CPU's default generator.
class Numbers {
 public:
  explicit Numbers(int device) : state_(cpu_.get_state()) {
    cpu_.set_state(at::Tensor(next_numbers(default_generator(device)).get_state()));
  }
  ~Numbers() { cpu_.set_state(state_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

 private:
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Tensor state_;
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(*stack) {
    for (auto& result : schema_.returns())
      TORCH_CHECK(
          !result.alias_info() || result.alias_info()->isWrite(), "the simulated device has no view ",
          op.operator_name());
  }

  void run() {
    check_device();
    BelowDispatch below;
    const auto& arguments = schema_.arguments();
    const auto begin = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) stack_[begin + i] = to_host(stack_[begin + i], arguments[i]);
    const int device = started_on_.value_or(current_device);
    std::optional<Numbers> numbers;
    bool takes_generator = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() != "generator") continue;
      takes_generator = true;
      auto& value = stack_[begin + i];
      auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
      if (generator.device().type() == kDevice) value = next_numbers(generator);
    }
    if (!takes_generator && op_.hasTag(at::Tag::nondeterministic_seeded)) numbers.emplace(device);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    numbers.reset();
    write_results(device);
  }

 private:
  // Wait for earlier work of the stream, before the operator reads anything.
  void start_on(int device) {
    if (started_on_) return;
    started_on_ = device;
    run_stream(current_stream(device));
    operation_.emplace(current_stream(device), finds_races ? schema_.name() : "");
  }

  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return to_host(value.toTensor(), argument);
    if (value.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(to_host(tensor, argument));
      return all;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
        all.push_back(tensor ? std::optional(to_host(*tensor, argument)) : tensor);
      return all;
    }
    if (value.isDevice()) {
      start_on(index_of(value.toDevice()));
      return c10::Device(at::kCPU);
    }
    if (argument.name() == "pin_memory" && value.isBool()) return false;
    return value;
  }

  at::Tensor to_host(const at::Tensor& tensor, const c10::Argument& argument) {
    if (!on_device(tensor)) return tensor;
    start_on(tensor.device().index());
    auto host = host_view(tensor);
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    if (!argument.kwarg_only() || !is_written) operation_->reads(tensor);
    if (!is_written) return host;
    if (late_kernels || argument.kwarg_only()) {  // an out= argument may be resized, which a view of memory cannot
      auto results = at::empty_strided(tensor.sizes(), tensor.strides(), host.options());
      if (!argument.kwarg_only()) copy_now(results, host);
      host = results;
    }
    written_.push_back({tensor, host});
    return host;
  }

  at::Tensor to_device(const at::Tensor& host, int device) {
    if (!host.defined() || on_device(host)) return host;
    for (auto& [original, results] : written_)
      if (results.is_same(host)) return original;
    auto result = empty_strided(
        host.sizes(), host.strides(), host.scalar_type(), {}, at::Device(kDevice, static_cast<c10::DeviceIndex>(device)),
        {});
    operation_->writes(result);
    copies_.push_back({host_view(result), host});
    return result;
  }

  void write_results(int device) {
    start_on(device);  // an operator without tensors
    for (auto& [original, results] : written_) {
      if (results.sizes() != original.sizes()) resize_(original, results.sizes(), {});
      operation_->writes(original);
      auto memory = host_view(original);
      if (results.numel() && results.const_data_ptr() != memory.const_data_ptr()) copies_.push_back({memory, results});
    }
    const auto n_results = schema_.returns().size();
    for (size_t i = stack_.size() - n_results; i < stack_.size(); ++i) {
      auto& value = stack_[i];
      if (value.isTensor()) {
        value = to_device(value.toTensor(), device);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> all;
        for (const at::Tensor& tensor : value.toTensorVector()) all.push_back(to_device(tensor, device));
        value = all;
      }
    }
    if (copies_.empty()) return;
    auto write = [copies = std::move(copies_)] {
      for (auto& [memory, results] : copies) copy_now(memory, results);
    };
    launch(current_stream(device), write, late_kernels);
  }

  struct Written {
    at::Tensor original, results;
  };
  struct Copy {
    at::Tensor memory, results;
  };
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::optional<int> started_on_;
  std::optional<Operation> operation_;
  std::vector<Written> written_;
  std::vector<Copy> copies_;
};

inline void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock lock;
  Call(op, stack).run();
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", simulated::copy_);
  library.impl("_local_scalar_dense", simulated::local_scalar_dense);
  library.impl("empty.memory_format", simulated::empty);
  library.impl("empty_strided", simulated::empty_strided);
  library.impl("resize_", simulated::resize_);
  library.impl("set_.source_Storage_storage_offset", simulated::set_strided);
  library.impl("set_.source_Storage", simulated::set_storage);
  library.impl("set_.source_Tensor", simulated::set_tensor);
  library.impl("record_stream", simulated::record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("view", simulated::view);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
}
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::kernel>());
}
