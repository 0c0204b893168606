// The CUDA runtime as far as onnxruntime needs it to believe in a device: its memory is the host's, kernels do nothing.

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cstdio>
#include <map>
#include <mutex>

namespace {

constexpr size_t kMemory = 80ull << 30;
constexpr int kMajor = 9, kMinor = 0, kProcessors = 132;
constexpr int kRuntime = 13000;

std::mutex guard;
std::map<const void*, size_t> allocated;  // device memory: where it begins, and how long it is
bool capturing = false;
long launched_kernels = 0, launched_graphs = 0, bytes_to_device = 0, bytes_to_host = 0;
thread_local int handle;

// Pages come into being only where something is copied, so that tensors of any size cost nothing.
cudaError_t allocate(void** out, size_t size) {
  size = size ? size : 1;
  *out = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::lock_guard<std::mutex> lock(guard);
  allocated[*out] = size;
  return cudaSuccess;
}

cudaError_t release(void* begin) {
  std::lock_guard<std::mutex> lock(guard);
  auto found = allocated.find(begin);
  if (found == allocated.end()) return begin ? cudaErrorInvalidValue : cudaSuccess;
  munmap(begin, found->second);
  allocated.erase(found);
  return cudaSuccess;
}

bool on_device(const void* at) {
  std::lock_guard<std::mutex> lock(guard);
  auto after = allocated.upper_bound(at);
  if (after == allocated.begin()) return false;
  --after;
  return static_cast<const char*>(at) < static_cast<const char*>(after->first) + after->second;
}

cudaError_t copy(void* to, const void* from, size_t size) {
  bool source = on_device(from), target = on_device(to);
  if (target && !source) bytes_to_device += size;
  if (source && !target) bytes_to_host += size;
  if (!(source && target)) memmove(to, from, size);  // what kernels would have written there is not there to move
  return cudaSuccess;
}

}  // namespace

extern "C" {

// Counts of what happened so far. This is no function of CUDA.
void standin_counts(long* out) {
  out[0] = launched_kernels;
  out[1] = launched_graphs;
  out[2] = bytes_to_device;
  out[3] = bytes_to_host;
}

// --- the device ---

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = kRuntime, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = kRuntime, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = *total = kMemory, cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in for CUDA"; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the stand-in for CUDA"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* about, int) {
  memset(about, 0, sizeof *about);
  strcpy(about->name, "stand-in, not a GPU");
  about->totalGlobalMem = kMemory;
  about->sharedMemPerBlock = 48 << 10;
  about->sharedMemPerBlockOptin = about->sharedMemPerMultiprocessor = 227 << 10;
  about->regsPerBlock = about->regsPerMultiprocessor = 65536;
  about->warpSize = 32;
  about->memPitch = 0x7fffffff;
  about->maxThreadsPerBlock = 1024;
  about->maxThreadsPerMultiProcessor = 2048;
  about->maxBlocksPerMultiProcessor = 32;
  for (int i = 0; i < 3; ++i) about->maxThreadsDim[i] = i == 2 ? 64 : 1024;
  for (int i = 0; i < 3; ++i) about->maxGridSize[i] = i ? 65535 : 0x7fffffff;
  about->totalConstMem = 64 << 10;
  about->major = kMajor;
  about->minor = kMinor;
  about->textureAlignment = 512;
  about->multiProcessorCount = kProcessors;
  about->canMapHostMemory = about->concurrentKernels = about->unifiedAddressing = about->managedMemory = 1;
  about->cooperativeLaunch = about->memoryPoolsSupported = 1;
  about->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp about;
  cudaGetDeviceProperties(&about, device);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = about.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = about.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrWarpSize: *value = about.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = about.multiProcessorCount; break;
    case cudaDevAttrComputeCapabilityMajor: *value = kMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kMinor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(about.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(about.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = static_cast<int>(about.sharedMemPerMultiprocessor); break;
    case cudaDevAttrMaxRegistersPerBlock: *value = about.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = about.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = about.maxGridSize[1]; break;
    case cudaDevAttrL2CacheSize: *value = about.l2CacheSize; break;
    default: *value = 1;
  }
  return cudaSuccess;
}

// --- memory ---

cudaError_t cudaMalloc(void** out, size_t size) { return allocate(out, size); }
cudaError_t cudaMallocFromPoolAsync(void** out, size_t size, cudaMemPool_t, cudaStream_t) { return allocate(out, size); }
cudaError_t cudaFree(void* begin) { return release(begin); }
cudaError_t cudaFreeAsync(void* begin, cudaStream_t) { return release(begin); }
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned) { return *out = calloc(size + 64, 1), cudaSuccess; }
cudaError_t cudaMallocHost(void** out, size_t size) { return cudaHostAlloc(out, size, 0); }
cudaError_t cudaFreeHost(void* begin) { return free(begin), cudaSuccess; }

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* at) {
  bool device = on_device(at);
  about->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  about->device = 0;
  about->devicePointer = device ? const_cast<void*>(at) : nullptr;
  about->hostPointer = device ? nullptr : const_cast<void*>(at);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind,
    cudaStream_t) {
  for (size_t i = 0; i < height; ++i)
    copy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width);
  return cudaSuccess;
}
cudaError_t cudaMemcpyFromSymbol(void* to, const void*, size_t size, size_t, cudaMemcpyKind) {
  return memset(to, 0, size), cudaSuccess;
}
cudaError_t cudaMemset(void* at, int, size_t) { return at ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void* value) {
  return memset(value, 0, sizeof(unsigned long long)), cudaSuccess;
}

// --- streams, graphs, kernels ---

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) { return *milliseconds = 1, cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return capturing = true, cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = false;
  *graph = reinterpret_cast<cudaGraph_t>(&handle);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) {
  return *out = reinterpret_cast<cudaGraphExec_t>(&handle), cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return ++launched_kernels, cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return ++launched_kernels, cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return ++launched_graphs, cudaSuccess; }

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* about, const void*) {
  memset(about, 0, sizeof *about);
  about->maxThreadsPerBlock = 1024;
  about->numRegs = 32;
  about->ptxVersion = about->binaryVersion = 10 * kMajor + kMinor;
  about->maxDynamicSharedSizeBytes = 227 << 10;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *function = nullptr;
  if (status) *status = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* binary = &binary;
  return &binary;
}
}
