// Memory of the device, and pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "reports.h"
#include "streams.h"

namespace simulated {

constexpr int kPoison = 0xFF;  // a NaN in every floating point dtype, -1 as an integer
constexpr size_t kAlignment = 512;
constexpr size_t kMostFreedBytes = size_t{512} << 20;

inline void* aligned_memory(size_t n) {
  void* pointer = nullptr;
  TORCH_CHECK(posix_memalign(&pointer, kAlignment, n) == 0, "the host has no ", n, " bytes for a simulated device");
  memset(pointer, kPoison, n);
  return pointer;
}

// ---- device memory
//
// c10/cuda/CUDACachingAllocator.cpp: a freed block may be used again at once by later work of the stream for which it
// was allocated. A block with record_stream calls is used again when every such stream has reached the point of the
// free. Here a freed block is never used again. It is poisoned in the order of its stream, as if other data had been
// written to it, so that a reader on another stream finds NaN.

// A read or a write of device memory, for the detector of races.
struct Access {
  uintptr_t begin, end;
  bool writes;
  StreamId stream;
  uint64_t number;  // of the operation in its stream
  std::string by;   // operator and line of Python
};
struct Block {
  size_t n_bytes;
  StreamId stream;
  std::vector<StreamId> used_on;  // streams of record_stream
  uint64_t number;                // of the allocation
  std::vector<Access> accesses;
};
struct FreedBlock {
  void* pointer;
  Block block;
  std::vector<MarkPtr> uses;
};
struct Poisoned {
  void* pointer;
  size_t n_bytes;
  uint64_t number;  // of the last work at the time. Earlier work may still hold the pointer
};

inline std::unordered_map<void*, Block> blocks;
inline uint64_t n_allocations = 0;
inline std::vector<FreedBlock> freed;
inline std::deque<Poisoned> poisoned;
inline size_t poisoned_bytes = 0;
inline int64_t allocated_bytes[kMostDevices] = {}, peak_bytes[kMostDevices] = {};

inline void poison_in_order(void* pointer, const Block& block) {
  auto poison = [pointer, n_bytes = block.n_bytes] {
    memset(pointer, kPoison, n_bytes);
    poisoned.push_back({pointer, n_bytes, n_enqueued});
    poisoned_bytes += n_bytes;
  };
  if (queues[block.stream].empty()) poison();
  else enqueue(block.stream, {poison, nullptr, nullptr});
}

inline void remember_accesses(const Block& block);  // of races.h

inline void free_block(void* pointer) {
  if (!pointer) return;
  Lock lock;
  Block block = std::move(blocks.at(pointer));
  if (finds_races) remember_accesses(block);
  blocks.erase(pointer);
  allocated_bytes[device_of(block.stream)] -= static_cast<int64_t>(block.n_bytes);
  if (block.used_on.empty()) return poison_in_order(pointer, block);
  std::vector<MarkPtr> uses;  // that nobody waits for, because a wait would replace one that is missing elsewhere
  for (auto stream : block.used_on) uses.push_back(record(stream));
  freed.push_back({pointer, std::move(block), std::move(uses)});
}

// Poison freed blocks whose streams have reached the free, and return poisoned memory to the host.
inline void collect_freed() {
  std::vector<FreedBlock> waiting;
  for (auto& one : freed) {
    bool unused = true;
    for (auto& use : one.uses) unused &= use->reached;
    if (unused) poison_in_order(one.pointer, one.block);
    else waiting.push_back(std::move(one));
  }
  freed = std::move(waiting);
  if (poisoned_bytes > kMostFreedBytes) run_device(-1);  // devices may do so at any time
  auto oldest = oldest_work();
  while (!poisoned.empty() && poisoned.front().number < oldest) {
    poisoned_bytes -= poisoned.front().n_bytes;
    free(poisoned.front().pointer);
    poisoned.pop_front();
  }
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock;
    int device = current_device;
    c10::Device on(kDevice, static_cast<c10::DeviceIndex>(device));
    if (!n) return {nullptr, nullptr, &free_block, on};
    TORCH_CHECK_WITH(
        OutOfMemoryError, !is_due(faults.allocation),
        "CUDA out of memory. Tried to allocate ", n, " bytes (simulated) on GPU ", device);
    collect_freed();
    void* pointer = aligned_memory(n);
    blocks[pointer] = {n, current_stream(device), {}, ++n_allocations, {}};
    allocated_bytes[device] += static_cast<int64_t>(n);
    peak_bytes[device] = std::max(peak_bytes[device], allocated_bytes[device]);
    return {pointer, pointer, &free_block, on};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock;
    auto found = blocks.find(data.get());
    if (found != blocks.end() && found->second.stream != stream.id()) found->second.used_on.push_back(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { peak_bytes[device] = allocated_bytes[device]; }
};
inline DeviceAllocator device_allocator;

// ---- pinned memory
//
// ATen/core/CachingHostAllocator.h: pin_memory() memory is used again when every copy that torch has started with it
// is complete. Memory that the program registers with cudaHostRegister has no such keeper: the program itself must wait
// for its copies before cudaHostUnregister.

struct PinnedRange {
  size_t n_bytes;
  bool registered;
  std::vector<MarkPtr> copies;
};
struct FreedHostMemory {
  void* pointer;
  size_t n_bytes;
  std::vector<MarkPtr> copies;
};
inline std::map<uintptr_t, PinnedRange> pinned;
inline std::vector<FreedHostMemory> freed_host_memory;
inline int64_t pinned_by_torch = 0, n_registered = 0, n_unregistered = 0, n_unregistered_in_use = 0;

inline PinnedRange* pinned_range(const void* pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  auto found = pinned.upper_bound(address);
  if (found == pinned.begin()) return nullptr;
  --found;
  return address < found->first + found->second.n_bytes ? &found->second : nullptr;
}
inline bool is_pinned(const void* pointer) {
  Lock lock;
  return pinned_range(pointer) != nullptr;
}
inline void forget_reached(std::vector<MarkPtr>& marks) {
  std::erase_if(marks, [](const MarkPtr& mark) { return mark->reached; });
}
inline void used_by_copy(const void* pointer, StreamId stream) {
  auto* range = pinned_range(pointer);
  if (!range) return;
  forget_reached(range->copies);
  range->copies.push_back(record(stream));
}

inline void collect_freed_host_memory() {
  std::vector<FreedHostMemory> waiting;
  for (auto& one : freed_host_memory) {
    forget_reached(one.copies);
    if (one.copies.empty()) free(one.pointer);
    else waiting.push_back(std::move(one));
  }
  freed_host_memory = std::move(waiting);
}
inline void free_pinned(void* pointer) {
  if (!pointer) return;
  Lock lock;
  auto found = pinned.find(reinterpret_cast<uintptr_t>(pointer));
  auto range = std::move(found->second);
  pinned.erase(found);
  pinned_by_torch -= static_cast<int64_t>(range.n_bytes);
  freed_host_memory.push_back({pointer, range.n_bytes, std::move(range.copies)});
  collect_freed_host_memory();
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    Lock lock;
    collect_freed_host_memory();
    n = std::max<size_t>(n, 1);
    void* pointer = aligned_memory(n);
    pinned[reinterpret_cast<uintptr_t>(pointer)] = {n, false, {}};
    pinned_by_torch += static_cast<int64_t>(n);
    return {pointer, pointer, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    Lock lock;
    used_by_copy(pointer, stream.id());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2;  // of cudaError_t

inline int host_register(uintptr_t address, size_t n_bytes) {
  Lock lock;
  check_device();
  if (is_due(faults.host_register)) return kMemoryAllocation;
  if (pinned_range(reinterpret_cast<void*>(address))) return kInvalidValue;
  pinned[address] = {n_bytes, true, {}};
  ++n_registered;
  return kSuccess;
}
// Counts calls during a copy, which is an error of the program, and runs the copy, because the memory may go now. The
// copies of a lost device are over.
inline int host_unregister(uintptr_t address) {
  Lock lock;
  auto found = pinned.find(address);
  if (found == pinned.end() || !found->second.registered) return kInvalidValue;
  auto copies = std::move(found->second.copies);
  pinned.erase(found);
  ++n_unregistered;
  forget_reached(copies);
  if (!copies.empty() && !device_lost) {
    ++n_unregistered_in_use;
    report("host memory is unregistered before the end of a copy is known");
  }
  for (auto& copy : copies) run_until(copy->stream, copy);
  return kSuccess;
}

}  // namespace simulated
