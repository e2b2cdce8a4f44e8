// Reports of bugs that the device sees in the program: races, and memory that is unregistered during a copy.
//
// A process appends each report at once to a file of its own in the folder that HOLDFAST_SIMULATED_CUDA_REPORTS names,
// because a process that is killed cannot be asked later.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

namespace simulated {

inline bool has_reported = false;

inline std::string report_file(const char* folder) {
  return std::string(folder) + "/" + std::to_string(getpid());
}
inline void report(const std::string& bug) {
  if (const char* folder = std::getenv("HOLDFAST_SIMULATED_CUDA_REPORTS")) {
    std::ofstream(report_file(folder), std::ios::app) << bug << "\n";
    has_reported = true;
  }
}
inline void forget_reports() {
  const char* folder = std::getenv("HOLDFAST_SIMULATED_CUDA_REPORTS");
  if (has_reported && folder) std::remove(report_file(folder).c_str());
  has_reported = false;
}

}  // namespace simulated
