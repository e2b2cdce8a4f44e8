// A detector of races between streams: two accesses of the same device memory, one of them a write, that no wait orders.
//
// Vector clocks (Lamport, Fidge, Mattern): each stream counts its operations, and knows of every other stream the last
// operation that has happened before its own next one. Events and synchronisation carry this knowledge. So a race is
// found in any schedule, also if the values happen to be right.
//
// All threads of the host count as one, which misses races between them. Accesses of the host itself are not seen: for
// pinned memory only late copies help.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "memory.h"

namespace simulated {

inline std::vector<std::string> races;

inline void found_race(const std::string& race) {
  races.push_back(race);
  report(race);
}

// The line of Python that is running, outside of torch.
inline std::string python_line() {
  if (!Py_IsInitialized()) return "no Python";
  pybind11::gil_scoped_acquire gil;
  std::string found = "a thread of torch";
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame) {
    auto* code = PyFrame_GetCode(frame);
    auto file = pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(code)).attr("co_filename");
    found = pybind11::str(file).cast<std::string>() + ":" + std::to_string(PyFrame_GetLineNumber(frame));
    auto* caller = found.find("/torch/") == std::string::npos ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  return found;
}

inline std::string described(const Access& access) {
  return std::string(access.writes ? "written" : "read") + " by " + access.by + " on stream " +
      std::to_string(access.stream & 0xFFFFFFFF) + " of device " + std::to_string(device_of(access.stream));
}

inline bool overlap(const Access& one, const Access& other) { return one.begin < other.end && other.begin < one.end; }
inline bool covers(const Access& one, const Access& other) {
  return one.begin <= other.begin && other.end <= one.end;
}
inline bool is_ordered(const Access& before, StreamId stream) {
  return before.stream == stream || clocks[stream][before.stream] >= before.number;
}

// Accesses of freed memory that nothing orders with its stream, which may use it again for any later block.
struct FreedAccess {
  Access access;
  uint64_t n_allocations;  // at the time of the free
};
inline std::map<StreamId, std::vector<FreedAccess>> freed_accesses;

inline void remember_accesses(const Block& block) {
  learn(clocks[block.stream], host_clock);
  auto& recorded = block.used_on;
  for (auto& access : block.accesses)
    if (!is_ordered(access, block.stream) &&
        std::find(recorded.begin(), recorded.end(), access.stream) == recorded.end())
      freed_accesses[block.stream].push_back({access, n_allocations});
}

inline void find_uses_of_freed_memory(const Block& block, const Access& access) {
  std::erase_if(freed_accesses[block.stream], [&](const FreedAccess& freed) {
    if (is_ordered(freed.access, block.stream)) return true;
    if (block.number <= freed.n_allocations || is_ordered(freed.access, access.stream)) return false;
    found_race(
        "memory " + described(freed.access) + " is freed without record_stream, and may be the memory " +
        described(access) + ", without a wait between them");
    return true;
  });
}

// One operator, or one copy, on a stream.
class Operation {
 public:
  Operation(StreamId stream, const std::string& name) : stream_(stream) {
    if (!finds_races) return;
    by_ = name + " (" + python_line() + ")";
    learn(clocks[stream], host_clock);
    number_ = ++clocks[stream][stream];
  }
  void reads(const at::Tensor& tensor) const { touches(tensor, false); }
  void writes(const at::Tensor& tensor) const { touches(tensor, true); }

 private:
  void touches(const at::Tensor& tensor, bool writes) const {
    if (!finds_races || !tensor.numel()) return;
    auto found = blocks.find(tensor.storage().mutable_data());
    if (found == blocks.end()) return;
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    Access access{begin, begin + (last + 1) * tensor.itemsize(), writes, stream_, number_, by_};
    find_uses_of_freed_memory(found->second, access);
    auto& earlier = found->second.accesses;
    for (auto& other : earlier)
      if ((writes || other.writes) && overlap(access, other) && !is_ordered(other, stream_))
        found_race("memory " + described(other) + ", and " + described(access) + ", without a wait between them");
    std::erase_if(earlier, [&](const Access& other) {  // a race with these would also be one with this access
      return covers(access, other) && is_ordered(other, stream_) &&
          (writes || (!other.writes && other.stream == stream_));
    });
    earlier.push_back(std::move(access));
  }

  StreamId stream_;
  uint64_t number_ = 0;
  std::string by_;
};

}  // namespace simulated
