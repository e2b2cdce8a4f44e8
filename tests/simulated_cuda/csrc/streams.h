// Streams and events that progress as late as CUDA allows.
//
// CUDA C++ Programming Guide, "Asynchronous Concurrent Execution": work in one stream runs in order, work in different
// streams has no order except through events and synchronisation, and a launch returns before its work has run. torch's
// own streams do not synchronise with the legacy default stream (c10/cuda/CUDAStream.cpp, cudaStreamNonBlocking).
//
// Here a stream is a queue of work that nobody runs until a wait requires it: a synchronisation of the host, an event
// that another stream reaches, or a query (so that polling ends). This order of a run is legal, and it is always the
// same.
#pragma once

#include <Python.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pybind11/gil.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr int kMostDevices = 16;

inline int n_devices = 2;
inline bool late_copies = true;    // copies run when a wait requires them
inline bool late_kernels = false;  // the result of a stream's last kernel reaches memory when a wait requires it

// ---- mutual exclusion

inline std::recursive_mutex mutex;

// Holds the mutex. A thread that waits for it gives up the GIL, because the owner of the mutex may need the GIL.
class Lock {
 public:
  Lock() {
    if (mutex.try_lock()) return;
    if (Py_IsInitialized() && PyGILState_Check()) {
      pybind11::gil_scoped_release release;
      mutex.lock();
    } else {
      mutex.lock();
    }
  }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

// ---- injected faults

// The n-th call from now fails. 0: no fault.
struct Faults {
  int64_t allocation = 0, copy = 0, host_register = 0, collective = 0;
};
inline Faults faults;
inline bool device_lost = false;

inline bool is_due(int64_t& countdown) { return countdown > 0 && --countdown == 0; }

// After a failed copy or kernel every later call returns the same error ("sticky" errors of the CUDA Runtime API).
inline void check_device() {
  if (device_lost)
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 719,
        "CUDA error: unspecified launch failure (simulated: the device was lost in a copy)");
}

// ---- work, in the order of its stream

using StreamId = int64_t;

// Stream -> number of its last operation that has happened before (see races.h).
using Clock = std::map<StreamId, uint64_t>;
inline bool finds_races = false;
inline std::map<StreamId, Clock> clocks;
inline Clock host_clock;

inline void learn(Clock& clock, const Clock& other) {
  if (!finds_races) return;
  for (auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

// A point in the work of a stream: what cudaEventRecord stores in an event.
struct Mark {
  StreamId stream;
  Clock clock;
  bool reached = false;
  double reached_at_ms = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Work {
  std::function<void()> run;
  MarkPtr wait_for, reaches;
  uint64_t number = 0;
};

inline std::map<StreamId, std::deque<Work>> queues;
inline uint64_t n_enqueued = 0, n_deferred = 0;

inline thread_local int current_device = 0;
inline thread_local StreamId current_streams[kMostDevices] = {};  // numbers of the streams, without their device

inline StreamId stream_id(int device, int64_t number) { return (static_cast<StreamId>(device) << 32) | number; }
inline int device_of(StreamId id) { return static_cast<int>(id >> 32); }
inline int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }
inline StreamId current_stream(int device) { return stream_id(device, current_streams[device]); }
inline c10::Stream as_stream(StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device_of(id))), id);
}

// Real streams come from a pool of 32 and may be the same one. No code may rely on that, so here each is a new one.
inline StreamId new_stream(int device) {
  static int64_t n_streams = 0;
  Lock lock;
  return stream_id(device, ++n_streams);
}

inline void run_until(StreamId id, const MarkPtr& mark);

inline void run_next(StreamId id) {
  auto& queue = queues[id];
  Work work = std::move(queue.front());
  queue.pop_front();
  if (work.wait_for) run_until(work.wait_for->stream, work.wait_for);
  if (work.run) work.run();
  if (work.reaches) {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    work.reaches->reached = true;
    work.reaches->reached_at_ms = std::chrono::duration<double, std::milli>(now).count();
  }
}
inline void run_until(StreamId id, const MarkPtr& mark) {
  while (!mark->reached && !queues[id].empty()) run_next(id);
}
inline void run_stream(StreamId id) {
  while (!queues[id].empty()) run_next(id);
}
inline void run_device(int device) {
  std::vector<StreamId> ids;
  for (auto& [id, queue] : queues)
    if (device < 0 || device_of(id) == device) ids.push_back(id);
  for (auto id : ids) run_stream(id);
}

inline void enqueue(StreamId id, Work work) {
  work.number = ++n_enqueued;
  queues[id].push_back(std::move(work));
}
// Add work to a stream. Unless it may be late, all earlier work of the stream and then this one run at once.
inline void launch(StreamId id, std::function<void()> run, bool late) {
  if (late) {
    ++n_deferred;
    return enqueue(id, {std::move(run), nullptr, nullptr});
  }
  run_stream(id);
  run();
}
inline MarkPtr record(StreamId id) {
  learn(clocks[id], host_clock);
  auto mark = std::make_shared<Mark>(Mark{id, clocks[id]});
  enqueue(id, {nullptr, nullptr, mark});
  return mark;
}
inline void wait_for(StreamId id, const MarkPtr& mark) {
  learn(clocks[id], mark->clock);
  if (!mark->reached) enqueue(id, {nullptr, mark, nullptr});
}
// The host waits: until a mark, or for all work of a stream or device.
inline void host_waits(const MarkPtr& mark) {
  run_until(mark->stream, mark);
  learn(host_clock, mark->clock);
}
inline void host_waits(StreamId id) {
  run_stream(id);
  learn(host_clock, clocks[id]);
}
inline void host_waits_for_device(int device) {
  run_device(device);
  for (auto& [id, clock] : clocks)
    if (device_of(id) == device) learn(host_clock, clock);
}
// Number of the oldest work that has not run.
inline uint64_t oldest_work() {
  uint64_t oldest = UINT64_MAX;
  for (auto& [id, queue] : queues)
    if (!queue.empty()) oldest = std::min(oldest, queue.front().number);
  return oldest;
}

}  // namespace simulated
