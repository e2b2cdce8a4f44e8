// A simulated CUDA device for a torch without CUDA: memory of the host, operators of the CPU, streams of CUDA.
//
// This extension is the part below torch's Python: it registers what libtorch_cuda.so would. device.py completes
// torch.cuda. It is compiled for one version of torch, of which it uses private names.
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "kernels.h"

C10_REGISTER_GUARD_IMPL(CUDA, simulated::Guard)

namespace {

// torch asks for the hooks of CUDA while it is imported and keeps the answer. Without CUDA these are hooks that refuse
// every call, in static memory. The simulated ones take their place: they have the same size and no members.
void replace_hooks() {
  static_assert(sizeof(simulated::Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) simulated::Hooks();
}

void inject(const std::string& fault, int64_t nth) {
  simulated::Lock lock;
  auto& faults = simulated::faults;
  std::map<std::string, int64_t*> by_name{
      {"allocation", &faults.allocation},
      {"copy", &faults.copy},
      {"host_register", &faults.host_register},
      {"collective", &faults.collective}};
  *by_name.at(fault) = nth;
  if (fault == "copy") simulated::device_lost = false;
}

c10::intrusive_ptr<simulated::Collectives> collectives(
    c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, double timeout_s) {
  auto timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  return c10::make_intrusive<simulated::Collectives>(std::move(gloo), rank, size, timeout);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  c10::SetAllocator(kDevice, &device_allocator);
  at::setHostAllocator(kDevice, &pinned_allocator);
  replace_hooks();

  m.def("set_mode", [](bool copies, bool kernels, bool with_races) {
    Lock lock;
    run_device(-1);
    finds_races = with_races;
    clocks.clear();
    host_clock.clear();
    races.clear();
    forget_reports();
    freed_accesses.clear();
    for (auto& [pointer, block] : blocks) block.accesses.clear();
    late_copies = copies;
    late_kernels = kernels;
  });
  m.def("races", [] {
    Lock lock;
    return races;
  });
  m.def("inject", inject);
  m.def("counts", [] {
    Lock lock;
    return std::map<std::string, int64_t>{
        {"deferred", static_cast<int64_t>(n_deferred)},
        {"registered", n_registered},
        {"unregistered", n_unregistered},
        {"unregistered_in_use", n_unregistered_in_use},
        {"pinned_by_torch", pinned_by_torch}};
  });
  pybind11::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def("_group_start", [](Collectives&) {})  // around the aborts of several groups, in NCCL
      .def("_group_end", [](Collectives&) {});
  m.def("collectives", collectives);

  m.def("set_device_count", [](int count) { n_devices = std::min(count, kMostDevices); });
  m.def("device_count", [] { return n_devices; });
  m.def("current_device", [] { return simulated::current_device; });
  m.def("set_device", set_device);
  m.def("exchange_device", exchange_device);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("default_stream_id", [](int device) { return stream_id(device, 0); });
  m.def("allocated_bytes", [](int device) { return allocated_bytes[device]; });
  m.def("peak_bytes", [](int device) { return peak_bytes[device]; });
  m.def("reset_peak_bytes", [](int device) { device_allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("host_register", host_register);
  m.def("host_unregister", host_unregister);
  m.def("resize_storage", [](const at::Tensor& of, size_t n_bytes) {
    resize_storage(*of.storage().unsafeGetStorageImpl(), n_bytes);
  });
}
