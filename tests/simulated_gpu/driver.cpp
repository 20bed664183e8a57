// A simulated GPU: the runtime and driver of CUDA, and cuBLAS, without a device.
//
// Preloaded into a process with the CUDA build of torch, it makes the host side of a GPU program
// run: torch's dispatcher, caching allocator, streams, pinned memory and graph captures, Triton's
// compiler and launcher, Inductor, DDP and FSDP. Device memory is host memory that is mapped when
// it is touched, so that large models cost nothing.
//
// It enforces: the size of the memory; the limits of a launch; the device of a stream and of every
// pointer that Triton's launcher gets; what a graph capture prohibits. It counts launches, copies,
// synchronisations, captures and collectives.
//
// Kernels compute nothing: all reads from the device give zeros. values.py computes what they would
// have computed, and emulated.py executes our own kernels from their PTX.
//
// It cannot say: how fast anything is; whether streams race (everything has completed when a call
// returns); what tensor cores, TF32 or cuBLAS round to; how memory fragments over time.
//
// Environment: SIMULATED_GPU_CAPABILITY=90, SIMULATED_GPU_GB=80, SIMULATED_GPU_DEVICES=1.
//
// Collectives between processes are in nccl.cpp.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex mutex;

long setting(const char* name, long otherwise) {
  const char* text = getenv((std::string("SIMULATED_GPU_") + name).c_str());
  return text ? atol(text) : otherwise;
}
const size_t memory_size = size_t(setting("GB", 80)) * 1000000000;
const int capability = setting("CAPABILITY", 90);
const int n_devices = setting("DEVICES", 1);

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<bool> has_values{false};  // somebody computes what kernels would have computed

cudaError_t fail(cudaError_t error) { return last_error = error; }

// Handles of streams, events, graphs and modules are numbers.
template <class T>
T new_handle() {
  static std::atomic<size_t> next{0x1000};
  return (T)(next += 16);
}

// -------------------------------------------------------------------------------------------------
// Counts, by name. Python reads them.

std::map<std::string, long> counts, kernels;
void (*on_synchronize)(const char*) = nullptr;
bool (*on_launch)(CUfunction, const unsigned*, unsigned, unsigned, void**) = nullptr;

void count(const std::string& name, long n = 1) {
  Lock lock(mutex);
  counts[name] += n;
}

void count_illegal(const std::string& what) {
  count("illegal");
  count("illegal: " + what);
}

// -------------------------------------------------------------------------------------------------
// Memory: who owns an address.

struct Range {
  size_t size;
  bool on_device;  // otherwise pinned host memory
  int device;
};
std::map<char*, Range> ranges;
std::vector<size_t> used(64, 0);  // bytes by device

Range* find(const void* address) {
  auto next = ranges.upper_bound((char*)address);
  if (next == ranges.begin()) return nullptr;
  auto& [start, range] = *--next;
  return (char*)address < start + range.size ? &range : nullptr;
}

void* map_pages(size_t size) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  return address == MAP_FAILED ? nullptr : address;
}

cudaError_t unmap(void* address) {
  Lock lock(mutex);
  auto range = ranges.find((char*)address);
  if (range == ranges.end()) return address ? fail(cudaErrorInvalidValue) : cudaSuccess;
  if (range->second.on_device) used[range->second.device] -= range->second.size;
  munmap(address, range->second.size);
  ranges.erase(range);
  return cudaSuccess;
}

void copy(void* to, const void* from, size_t size) {
  Range *target, *source;
  {
    Lock lock(mutex);
    target = find(to);
    source = find(from);
  }
  const bool to_device = target && target->on_device, from_device = source && source->on_device;
  if (to_device && from_device) count("copies on the device");
  else if (to_device) count(source ? "pinned copies" : "pageable copies");
  else if (from_device) count(target ? "pinned reads" : "pageable reads");
  if (has_values || !(to_device || from_device)) memmove(to, from, size);
  else if (!to_device) memset(to, 0, size);
}

// -------------------------------------------------------------------------------------------------
// Captures: what must not happen while a stream is captured.

std::map<cudaStream_t, int> stream_device;
std::map<cudaStream_t, cudaStreamCaptureStatus> captures;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

bool is_capturing(cudaStream_t stream) { return captures.count(stream) > 0; }

cudaError_t invalidate_captures(const char* what) {
  count_illegal(std::string(what) + " during a capture");
  for (auto& capture : captures) capture.second = cudaStreamCaptureStatusInvalidated;
  return fail(cudaErrorStreamCaptureUnsupported);
}

// Allocations and queries: prohibited in a thread that has not relaxed its mode.
cudaError_t check_no_capture(const char* what) {
  Lock lock(mutex);
  if (captures.empty() || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  return invalidate_captures(what);
}

cudaError_t synchronize(const char* what, bool in_capture) {
  {
    Lock lock(mutex);
    if (in_capture) return invalidate_captures(what);
  }
  count("synchronisations");
  if (on_synchronize) on_synchronize(what);
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
// Launches

bool is_valid_launch(const unsigned* grid, const unsigned* block, size_t shared) {
  const unsigned threads = block[0] * block[1] * block[2];
  bool valid = grid[0] && grid[1] && grid[2] && threads && threads <= 1024;
  valid = valid && grid[0] <= 2147483647u && grid[1] <= 65535 && grid[2] <= 65535;
  return valid && shared <= 232448;
}

bool launch(const std::string& name, const unsigned* grid, const unsigned* block, size_t shared,
            cudaStream_t stream) {
  Lock lock(mutex);
  kernels[name]++;
  // A captured graph holds what is launched on its stream; all else runs once, now.
  const bool is_lost = !captures.empty() && !is_capturing(stream);
  if (is_lost) count_illegal("launch outside of a capture: " + name);
  if (stream && stream_device[stream] != device) {
    count_illegal("launch on a stream of another device: " + name);
    return false;
  }
  if (is_valid_launch(grid, block, shared)) return true;
  count_illegal("launch beyond the limits: " + name);
  return false;
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// For Python, and for nccl.cpp

API void simulated_count(const char* name) { count(name); }
API void simulated_set_values(bool on) { has_values = on; }
API void simulated_on_synchronize(void (*function)(const char*)) { on_synchronize = function; }
// function(kernel, grid[3], threads, shared bytes, pointers to the parameters) executes what Triton
// launches, and returns whether that went well.
API void simulated_on_launch(
    bool (*function)(CUfunction, const unsigned*, unsigned, unsigned, void**)) {
  on_launch = function;
}
API void simulated_reset() {
  Lock lock(mutex);
  counts.clear();
  kernels.clear();
}
// Write "count <tab> name" lines, of everything or of kernels; returns the length of the whole.
API size_t simulated_counts(bool of_kernels, char* out, size_t size) {
  Lock lock(mutex);
  std::string text;
  for (auto& [name, n] : of_kernels ? kernels : counts)
    text += std::to_string(n) + "\t" + name + "\n";
  snprintf(out, size, "%s", text.c_str());
  return text.size();
}

// -------------------------------------------------------------------------------------------------
// Devices

static int attribute(int name) {
  switch (name) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      return 1024;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrWarpSize:
      return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return 65536;
    case cudaDevAttrMultiProcessorCount:
      return 132;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return 2048;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 49152;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return 232448;
    case cudaDevAttrComputeCapabilityMajor:
      return capability / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return capability % 10;
    case cudaDevAttrL2CacheSize:
      return 52428800;
    case cudaDevAttrClockRate:
      return 1980000;
    case cudaDevAttrMemoryClockRate:
      return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrCanMapHostMemory:
      return 1;
  }
  return 0;
}

API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "NVIDIA H100 80GB HBM3 (simulated)");
  p->totalGlobalMem = memory_size;
  p->major = attribute(cudaDevAttrComputeCapabilityMajor);
  p->minor = attribute(cudaDevAttrComputeCapabilityMinor);
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->warpSize = attribute(cudaDevAttrWarpSize);
  p->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
  p->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  p->maxBlocksPerMultiProcessor = attribute(cudaDevAttrMaxBlocksPerMultiprocessor);
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = attribute(cudaDevAttrMaxGridDimX);
  p->maxGridSize[1] = p->maxGridSize[2] = attribute(cudaDevAttrMaxGridDimY);
  p->regsPerBlock = p->regsPerMultiprocessor = attribute(cudaDevAttrMaxRegistersPerBlock);
  p->sharedMemPerBlock = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  p->sharedMemPerMultiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  p->sharedMemPerBlockOptin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  p->l2CacheSize = attribute(cudaDevAttrL2CacheSize);
  p->memoryBusWidth = attribute(cudaDevAttrGlobalMemoryBusWidth);
  p->totalConstMem = 65536;
  p->textureAlignment = 512;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
  p->cooperativeLaunch = p->clusterLaunch = p->streamPrioritiesSupported = 1;
  p->asyncEngineCount = 3;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = attribute(name);
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceCount(int* n) {
  *n = n_devices;
  return cudaSuccess;
}
API cudaError_t cudaGetDevice(int* index) {
  *index = device;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= n_devices) return fail(cudaErrorInvalidDevice);
  device = index;
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int index) {
  snprintf(text, size, "0000:%02d:00.0", index + 1);
  return cudaSuccess;
}
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default:
      return "an error of the simulated GPU";
  }
}
API const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

// -------------------------------------------------------------------------------------------------
// Memory

API cudaError_t cudaMalloc(void** address, size_t size) {
  if (auto error = check_no_capture("cudaMalloc")) return error;
  Lock lock(mutex);
  *address = nullptr;
  if (!size) return cudaSuccess;
  const bool fits = used[device] + size <= memory_size;
  if (!fits || !(*address = map_pages(size))) return fail(cudaErrorMemoryAllocation);
  used[device] += size;
  count("allocations");
  ranges[(char*)*address] = {size, true, device};
  return cudaSuccess;
}
API cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  if (auto error = check_no_capture("cudaHostAlloc")) return error;
  Lock lock(mutex);
  *address = map_pages(size);
  ranges[(char*)*address] = {size, false, device};
  return cudaSuccess;
}
API cudaError_t cudaFree(void* address) { return unmap(address); }
API cudaError_t cudaFreeHost(void* address) { return unmap(address); }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = memory_size;
  *free = memory_size - used[device];
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock(mutex);
  const Range* range = find(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (range) attributes->type = range->on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = range ? range->device : -1;
  attributes->devicePointer = (void*)address;
  attributes->hostPointer = range && range->on_device ? nullptr : (void*)address;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t) {
  copy(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t) {
  copy(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
  if (auto error = synchronize("cudaMemcpy", !captures.empty())) return error;
  copy(to, from, n);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; row++)
    copy((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[1 << 16];
  *address = symbol;
  return cudaSuccess;
}

// Physical memory that is mapped into reserved addresses, for PyTorch's expandable segments

struct Physical {
  size_t size;
  int device;
};

API CUresult cuMemGetAllocationGranularity(
    size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = 1 << 21;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(
    CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = (CUdeviceptr)map_pages(size);
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
  munmap((void*)address, size);
  return CUDA_SUCCESS;
}
API CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* properties,
    unsigned long long) {
  Lock lock(mutex);
  const int index = properties->location.id;
  if (used[index] + size > memory_size) return CUDA_ERROR_OUT_OF_MEMORY;
  used[index] += size;
  count("allocations");
  *handle = (CUmemGenericAllocationHandle) new Physical{size, index};
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Lock lock(mutex);
  auto* physical = (Physical*)handle;
  used[physical->device] -= physical->size;
  delete physical;
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(
    CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle,
    unsigned long long) {
  Lock lock(mutex);
  ranges[(char*)address] = {size, true, ((Physical*)handle)->device};
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
  Lock lock(mutex);
  ranges.erase(ranges.lower_bound((char*)address), ranges.lower_bound((char*)address + size));
  madvise((void*)address, size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

// -------------------------------------------------------------------------------------------------
// Streams, events and graphs

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Lock lock(mutex);
  *stream = new_handle<cudaStream_t>();
  stream_device[*stream] = device;
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return synchronize("cudaStreamSynchronize", is_capturing(stream));
}
API cudaError_t cudaDeviceSynchronize() {
  return synchronize("cudaDeviceSynchronize", !captures.empty());
}
API cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return synchronize("cudaEventSynchronize", false);
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(mutex);
  return is_capturing(stream) ? invalidate_captures("cudaStreamQuery") : cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t) { return check_no_capture("cudaEventQuery"); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new_handle<cudaEvent_t>();
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Lock lock(mutex);
  if (!stream) return fail(cudaErrorStreamCaptureUnsupported);
  captures[stream] = cudaStreamCaptureStatusActive;
  count("captures");
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(mutex);
  const bool valid = captures[stream] == cudaStreamCaptureStatusActive;
  captures.erase(stream);
  *graph = valid ? new_handle<cudaGraph_t>() : nullptr;
  return valid ? cudaSuccess : fail(cudaErrorStreamCaptureInvalidated);
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(mutex);
  *status = is_capturing(stream) ? captures[stream] : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  cudaStreamIsCapturing(stream, status);
  if (id) *id = *status ? (unsigned long long)(size_t)stream : 0;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* executable, cudaGraph_t, unsigned long long) {
  *executable = new_handle<cudaGraphExec_t>();
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* n) {
  *n = 1;
  return cudaSuccess;
}
API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  count("graph launches");
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
// The kernels of torch, which are compiled into its libraries

static std::unordered_map<const void*, std::string> kernel_names;
struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local LaunchConfiguration configuration;

API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(mutex);
  kernel_names[host] = name;
}
API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *(cudaStream_t*)stream = configuration.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(
    const void* host, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  count("launches of torch");
  std::string name;
  {
    Lock lock(mutex);
    name = kernel_names.count(host) ? kernel_names[host] : "unknown";
  }
  const unsigned grid_size[] = {grid.x, grid.y, grid.z}, block_size[] = {block.x, block.y, block.z};
  const bool valid = launch(name, grid_size, block_size, shared, stream);
  return valid ? cudaSuccess : fail(cudaErrorInvalidConfiguration);
}
API cudaError_t __cudaLaunchKernel(
    void* host, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(host, grid, block, args, shared, stream);
}
API cudaError_t __cudaGetKernel(void** kernel, const void* host) {
  *kernel = (void*)host;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void** args) {
  return cudaLaunchKernel(host, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = capability;
  attributes->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* n, const void*, int block, size_t, unsigned) {
  *n = block ? 2048 / block : 1;
  return cudaSuccess;
}
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------
// The driver, which Triton and Inductor call

struct Function {
  std::string name;
};
static thread_local CUcontext context = nullptr;
static thread_local bool wrong_pointer = false;  // among those of the launch that is prepared

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* version) {
  cudaDriverGetVersion(version);
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* handle, int index) {
  *handle = index;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetCount(int* n) {
  *n = n_devices;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute name, CUdevice) {
  *value = attribute(name);
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext* current) {
  *current = context ? context : (CUcontext)0x100;
  return CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext current) {
  context = current;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice* handle) {
  *handle = device;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* primary, CUdevice index) {
  *primary = (CUcontext)(size_t)(0x100 + index);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = new_handle<CUmodule>();
  return CUDA_SUCCESS;
}
API CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoadData(module, nullptr);
}
API CUresult cuModuleLoad(CUmodule* module, const char*) {
  return cuModuleLoadData(module, nullptr);
}
API CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = (CUfunction) new Function{name};
  return CUDA_SUCCESS;
}
API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute name, CUfunction) {
  *value = 0;
  if (name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK) *value = 1024;
  if (name == CU_FUNC_ATTRIBUTE_NUM_REGS) *value = 64;
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void* out, CUpointer_attribute name, CUdeviceptr address) {
  Lock lock(mutex);
  const Range* range = find((void*)address);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = address;
  if (range->on_device && range->device != device) wrong_pointer = true;
  return CUDA_SUCCESS;
}
API CUresult cuLaunchKernelEx(
    const CUlaunchConfig* c, CUfunction function, void** parameters, void**) {
  const std::string& name = ((Function*)function)->name;
  const unsigned grid[] = {c->gridDimX, c->gridDimY, c->gridDimZ};
  const unsigned block[] = {c->blockDimX, c->blockDimY, c->blockDimZ};
  count("launches of Triton");
  const bool is_wrong = wrong_pointer;
  wrong_pointer = false;
  if (is_wrong) {
    count_illegal("pointer of another device: " + name);
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  if (!launch(name, grid, block, c->sharedMemBytes, c->hStream)) return CUDA_ERROR_INVALID_VALUE;
  if (!on_launch || on_launch(function, grid, block[0], c->sharedMemBytes, parameters))
    return CUDA_SUCCESS;
  return CUDA_ERROR_LAUNCH_FAILED;
}
API CUresult cuLaunchKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
    unsigned bz, unsigned shared, CUstream stream, void** parameters, void** extra) {
  CUlaunchConfig c = {};
  c.gridDimX = gx, c.gridDimY = gy, c.gridDimZ = gz;
  c.blockDimX = bx, c.blockDimY = by, c.blockDimZ = bz;
  c.sharedMemBytes = shared, c.hStream = stream;
  return cuLaunchKernelEx(&c, function, parameters, extra);
}
API CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "an error of the simulated GPU";
  if (error == CUDA_ERROR_LAUNCH_FAILED) *text = "unspecified launch failure";
  if (error == CUDA_ERROR_ILLEGAL_ADDRESS) *text = "an illegal memory access was encountered";
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR";
  return CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction, int, size_t) {
  *n = 2;
  return CUDA_SUCCESS;
}
API CUresult cuGetProcAddress_v2(
    const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result)
    *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// -------------------------------------------------------------------------------------------------
// cuBLAS: build.py makes its products calls of simulated_product(); the rest does nothing
//
// All products but cublasLtMatmul go to the stream that was set last.

static thread_local cudaStream_t blas_stream;

API int simulated_product() {
  const unsigned one[] = {1, 1, 1};
  count("matrix products");
  launch("a matrix product", one, one, 0, blas_stream);
  return 0;
}
API int cublasLtMatmul(
    void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
    void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  blas_stream = stream;
  return simulated_product();
}
API int cublasSetStream_v2(void*, cudaStream_t stream) {
  blas_stream = stream;
  return 0;
}
API int cublasCreate_v2(void** handle) {
  *handle = new_handle<void*>();
  return 0;
}
API int cublasGetMathMode(void*, int* mode) { return *mode = 0; }
API int cublasGetPointerMode_v2(void*, int* mode) { return *mode = 0; }
API size_t cublasLtGetVersion() { return 130000; }
API int cublasLtMatmulDescCreate(void** handle, int, int) { return cublasCreate_v2(handle); }
API int cublasLtMatrixLayoutCreate(void** handle, int, uint64_t, uint64_t, int64_t) {
  return cublasCreate_v2(handle);
}
API int cublasLtMatmulPreferenceCreate(void** handle) { return cublasCreate_v2(handle); }
API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* result, int* n) {
  memset(result, 0, 96);  // one cublasLtMatmulHeuristicResult_t: success, no workspace
  *n = 1;
  return 0;
}
