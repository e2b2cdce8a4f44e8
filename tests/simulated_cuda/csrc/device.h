// The device as torch's core sees it: current device, current streams, events, and the hooks of CUDA.
#pragma once

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "generator.h"
#include "memory.h"
#include "races.h"
#include "streams.h"

namespace simulated {

inline void set_device(int device) {
  TORCH_CHECK_WITH(
      ValueError, device < n_devices, "CUDA error: invalid device ordinal (simulated: ", device, " of ", n_devices, ")");
  if (device >= 0) current_device = device;
}
inline int exchange_device(int device) {
  int before = current_device;
  set_device(device);
  return before;
}

struct Event {
  MarkPtr mark;  // of the last record
};
inline MarkPtr mark_of(void* event) { return event ? static_cast<Event*>(event)->mark : nullptr; }

// The rules of events are those of cudaEventRecord, cudaStreamWaitEvent, cudaEventQuery and cudaEventSynchronize
// (CUDA Runtime API, "Event Management"): a wait applies to the last record before it, and a wait for an event that was
// never recorded does nothing.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(n_devices); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return as_stream(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(stream_id(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return as_stream(new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id() - stream_id(stream.device_index(), 0);
    return as_stream(before);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    check_device();
    if (queues[stream.id()].empty()) {
      learn(host_clock, clocks[stream.id()]);
      return true;
    }
    run_next(stream.id());
    return false;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    host_waits(stream.id());
    check_device();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock;
    host_waits_for_device(device < 0 ? current_device : device);
    check_device();
  }
  bool isStreamCapturing(const c10::Stream&) const override { return false; }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock;
    check_device();
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = simulated::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock;
    check_device();
    if (auto mark = mark_of(event)) wait_for(stream.id(), mark);
  }
  bool queryEvent(void* event) const override {
    Lock lock;
    check_device();
    auto mark = mark_of(event);
    if (!mark) return true;
    if (mark->reached) {
      learn(host_clock, mark->clock);
      return true;
    }
    run_next(mark->stream);
    return false;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock;
    if (auto mark = mark_of(event)) host_waits(mark);
    check_device();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return mark_of(to)->reached_at_ms - mark_of(from)->reached_at_ms;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator.recordStream(data, stream);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks() = default;
  explicit Hooks(at::CUDAHooksArgs) {}

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return n_devices; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(n_devices); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(simulated::current_device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? simulated::current_device : device);
  }
};

}  // namespace simulated
