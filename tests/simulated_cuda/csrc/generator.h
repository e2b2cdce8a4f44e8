// Random numbers of the device.
//
// ATen/cuda/CUDAGeneratorImpl.cpp: the state is 16 bytes, a seed and an offset. A kernel takes its numbers from both and
// moves the offset. Here a kernel draws from a CPU generator that is seeded with a mix of both, so other numbers than on
// a GPU, but as repeatable.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>

#include <cstring>

#include "streams.h"

namespace simulated {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl(c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(kKey)) {}

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  uint64_t current_seed() const override { return state_.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state_.seed;
  }
  void set_offset(uint64_t offset) override { state_.offset = offset; }
  uint64_t get_offset() const override { return state_.offset; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(State), "RNG state is wrong size");
    memcpy(&state_, state.data(), sizeof(State));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({sizeof(State)}, at::kByte, {}, {}, {}, {});
    memcpy(state.data_ptr(), &state_, sizeof(State));
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->state_ = state_;
    return copy;
  }
  // The numbers for the next kernel.
  at::Generator next() {
    uint64_t mixed = state_.seed + 0x9E3779B97F4A7C15ull * (state_.offset + 1);  // splitmix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    state_.offset += 4;  // as a call of Philox
    return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
  }

 private:
  struct State {
    uint64_t seed, offset;
  };
  State state_{c10::default_rng_seed_val, 0};
};

inline const at::Generator& default_generator(int device) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators[device < 0 ? current_device : device];
}
inline at::Generator next_numbers(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

}  // namespace simulated
