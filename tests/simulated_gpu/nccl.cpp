// NCCL between the processes of one machine, on the host, for the simulated GPU.
//
// Every collective is one exchange: each process publishes its bytes, a chunk at a time, in memory
// that all share, and reads what it needs of the others' chunks. Sums are taken in the order of the
// ranks. SIMULATED_GPU_ALONE=1: nothing is exchanged, for one process of a group that is not there.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

extern "C" void simulated_count(const char* name);

namespace {

constexpr size_t CHUNK = 1 << 20;
constexpr int MAX_RANKS = 16;
constexpr int TIMEOUT = 300;  // seconds

const bool alone = getenv("SIMULATED_GPU_ALONE") != nullptr;

struct Shared {
  std::atomic<uint64_t> arrived;  // at barriers, so far
  uint64_t sizes[MAX_RANKS];      // of what each rank publishes
  char chunks[MAX_RANKS][CHUNK];
};

struct Communicator {
  std::string name;
  int size, rank;
  int n_splits = 0;
  uint64_t barriers = 0;
  Shared* shared = nullptr;

  Communicator(const std::string& name, int size, int rank) : name(name), size(size), rank(rank) {
    if (alone) return;
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) abort();
    const int access = PROT_READ | PROT_WRITE;
    shared = (Shared*)mmap(nullptr, sizeof(Shared), access, MAP_SHARED, file, 0);
    close(file);
    barrier();
    shm_unlink(name.c_str());
  }

  ~Communicator() {
    if (shared) munmap(shared, sizeof(Shared));
  }

  void barrier() {
    const uint64_t target = ++barriers * size;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(TIMEOUT);
    shared->arrived++;
    while (shared->arrived < target) {
      usleep(50);
      if (std::chrono::steady_clock::now() < deadline) continue;
      fprintf(stderr, "simulated NCCL: a process did not take part in a collective\n");
      abort();
    }
  }

  // Publish `size` bytes, and read(rank, bytes, offset, n) the chunks of all, in order of the rank.
  using Read = std::function<void(int, const char*, size_t, size_t)>;
  void exchange(const void* bytes, size_t n_bytes, const Read& read) {
    simulated_count("collectives");
    if (alone) return;
    shared->sizes[rank] = n_bytes;
    barrier();
    const std::vector<size_t> sizes(shared->sizes, shared->sizes + size);
    const size_t longest = *std::max_element(sizes.begin(), sizes.end());
    for (size_t offset = 0; offset < longest; offset += CHUNK) {
      auto length = [&](int r) { return std::min(CHUNK, std::max(sizes[r], offset) - offset); };
      memcpy(shared->chunks[rank], (const char*)bytes + offset, length(rank));
      barrier();
      for (int r = 0; r < size; r++)
        if (length(r)) read(r, shared->chunks[r], offset, length(r));
      barrier();
    }
    barrier();  // before anybody publishes the next sizes
  }
};

// -------------------------------------------------------------------------------------------------
// Reductions

enum Type { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
constexpr size_t type_size[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum Operation { SUM, PRODUCT, MAX, MIN, AVERAGE, FIRST_SCALED };
std::map<int, double> scales;  // of the operations that multiply before they sum

struct bfloat16 {
  uint16_t bits;
  bfloat16(float x = 0) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = (wide + 0x7fff + (wide >> 16 & 1)) >> 16;  // to nearest, ties to even
  }
  operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
};

template <class T, class Wide>
void reduce_into(T* total, const T* x, size_t n, int operation, bool is_first) {
  const Wide scale = operation >= FIRST_SCALED ? Wide(scales[operation]) : Wide(1);
  for (size_t i = 0; i < n; i++) {
    const Wide b = Wide(x[i]) * scale, a = is_first ? b : Wide(total[i]);
    if (is_first) total[i] = T(b);
    else if (operation == PRODUCT) total[i] = T(a * b);
    else if (operation == MAX) total[i] = T(std::max(a, b));
    else if (operation == MIN) total[i] = T(std::min(a, b));
    else total[i] = T(a + b);
  }
}

void reduce_chunk(char* total, const char* x, size_t bytes, int type, int operation, bool first) {
  const size_t n = bytes / type_size[type];
  switch (type) {
    case INT8:
      return reduce_into<int8_t, int>((int8_t*)total, (int8_t*)x, n, operation, first);
    case UINT8:
      return reduce_into<uint8_t, int>((uint8_t*)total, (uint8_t*)x, n, operation, first);
    case INT32:
      return reduce_into<int32_t, int64_t>((int32_t*)total, (int32_t*)x, n, operation, first);
    case INT64:
      return reduce_into<int64_t, int64_t>((int64_t*)total, (int64_t*)x, n, operation, first);
    case FLOAT32:
      return reduce_into<float, float>((float*)total, (float*)x, n, operation, first);
    case FLOAT64:
      return reduce_into<double, double>((double*)total, (double*)x, n, operation, first);
    case BFLOAT16:
      return reduce_into<bfloat16, float>((bfloat16*)total, (bfloat16*)x, n, operation, first);
    default:
      fprintf(stderr, "simulated NCCL: no reduction of type %d\n", type);
      abort();
  }
}

void divide(void* total, size_t n, int type, int size) {
  for (size_t i = 0; i < n; i++) {
    if (type == FLOAT32) ((float*)total)[i] /= size;
    else if (type == FLOAT64) ((double*)total)[i] /= size;
    else if (type == BFLOAT16) ((bfloat16*)total)[i] = bfloat16(((bfloat16*)total)[i] / size);
    else abort();
  }
}

// Reduce elements first .. first + n - 1 of what all publish, `published` elements each.
void reduce(Communicator* c, const void* send, void* receive, size_t published, size_t first,
            size_t n, int type, int operation) {
  const size_t start = first * type_size[type], end = (first + n) * type_size[type];
  std::vector<char> total(n * type_size[type]);  // receive may be what is sent
  c->exchange(send, published * type_size[type],
              [&](int rank, const char* bytes, size_t offset, size_t length) {
                const size_t from = std::max(offset, start), to = std::min(offset + length, end);
                if (from < to)
                  reduce_chunk(total.data() + from - start, bytes + from - offset, to - from, type,
                               operation, rank == 0);
              });
  if (alone) return;
  if (operation == AVERAGE) divide(total.data(), n, type, c->size);
  memcpy(receive, total.data(), total.size());
}

// -------------------------------------------------------------------------------------------------
// Messages between two processes, which are exchanged when their group ends

struct Message {
  Communicator* communicator;
  char* bytes;
  size_t size;
  int peer;
};
thread_local std::vector<Message> sends, receives;
thread_local int group_depth = 0;

void exchange_messages() {
  if (sends.empty() && receives.empty()) return;
  Communicator* c = (sends.empty() ? receives : sends)[0].communicator;
  // In turn to the process that is `distance` ranks further; every process takes part in each turn.
  for (int distance = 0; distance < c->size; distance++) {
    const int to = (c->rank + distance) % c->size, from = (c->rank + c->size - distance) % c->size;
    auto to_peer = [&](const Message& m) { return m.peer == to; };
    auto from_peer = [&](const Message& m) { return m.peer == from; };
    auto sent = std::find_if(sends.begin(), sends.end(), to_peer);
    auto received = std::find_if(receives.begin(), receives.end(), from_peer);
    const bool any = sent != sends.end();
    c->exchange(any ? sent->bytes : nullptr, any ? sent->size : 0,
                [&](int rank, const char* bytes, size_t offset, size_t length) {
                  if (rank == from && received != receives.end())
                    memcpy(received->bytes + offset, bytes, length);
                });
  }
  sends.clear();
  receives.clear();
}

}  // namespace

// -------------------------------------------------------------------------------------------------
// The functions of NCCL that torch calls and whose results matter; build.py stubs the others

struct Id {
  char text[128];
};

API int ncclGetVersion(int* version) {
  *version = 22804;
  return 0;
}
API int ncclGetUniqueId(Id* id) {
  std::random_device random;
  snprintf(id->text, sizeof id->text, "/simulated-nccl-%08x%08x", random(), random());
  return 0;
}
API int ncclCommInitRankConfig(Communicator** c, int n, Id id, int rank, void*) {
  *c = new Communicator(id.text, n, rank);
  return 0;
}
API int ncclCommInitRank(Communicator** c, int n, Id id, int rank) {
  return ncclCommInitRankConfig(c, n, id, rank, nullptr);
}
API int ncclCommInitRankScalable(Communicator** c, int n, int rank, int, Id* id, void*) {
  return ncclCommInitRankConfig(c, n, *id, rank, nullptr);
}
// Processes of the same color form a group, in the order of their keys; a negative color: none.
API int ncclCommSplit(Communicator* c, int color, int key, Communicator** out, void*) {
  const int mine[] = {color, key};
  std::vector<std::pair<int, int>> members;  // (key, rank)
  c->exchange(mine, sizeof mine, [&](int rank, const char* bytes, size_t, size_t) {
    const int* theirs = (const int*)bytes;
    if (theirs[0] == color) members.push_back({theirs[1], rank});
  });
  if (alone) members.push_back({key, c->rank});
  std::sort(members.begin(), members.end());
  const std::pair<int, int> me{key, c->rank};
  const int rank = std::find(members.begin(), members.end(), me) - members.begin();
  const std::string split = std::to_string(c->n_splits++) + "-" + std::to_string(color);
  const std::string name = c->name + "-" + split;
  *out = color < 0 ? nullptr : new Communicator(name, members.size(), rank);
  return 0;
}
API int ncclCommDestroy(Communicator*) { return 0; }  // others may still be reading
API int ncclCommCount(Communicator* c, int* n) {
  *n = c->size;
  return 0;
}
API int ncclCommUserRank(Communicator* c, int* rank) {
  *rank = c->rank;
  return 0;
}
API int ncclCommGetAsyncError(Communicator*, int* error) { return *error = 0; }
API const char* ncclGetErrorString(int) { return "an error of the simulated NCCL"; }
API const char* ncclGetLastError(Communicator*) { return ""; }

API int ncclAllReduce(const void* send, void* receive, size_t n, int type, int operation,
                      Communicator* c, cudaStream_t) {
  reduce(c, send, receive, n, 0, n, type, operation);
  return 0;
}
API int ncclReduceScatter(const void* send, void* receive, size_t n, int type, int operation,
                          Communicator* c, cudaStream_t) {
  reduce(c, send, receive, n * c->size, n * c->rank, n, type, operation);
  return 0;
}
API int ncclAllGather(const void* send, void* receive, size_t n, int type, Communicator* c,
                      cudaStream_t) {
  const size_t size = n * type_size[type];
  c->exchange(send, size, [&](int rank, const char* bytes, size_t offset, size_t length) {
    memcpy((char*)receive + rank * size + offset, bytes, length);
  });
  return 0;
}
API int ncclAlltoAll(const void* send, void* receive, size_t n, int type, Communicator* c,
                     cudaStream_t) {
  const size_t size = n * type_size[type], start = size * c->rank, end = start + size;
  const auto read = [&](int rank, const char* bytes, size_t offset, size_t length) {
    const size_t from = std::max(offset, start), to = std::min(offset + length, end);
    char* target = (char*)receive + rank * size + from - start;
    if (from < to) memcpy(target, bytes + from - offset, to - from);
  };
  c->exchange(send, size * c->size, read);
  return 0;
}
API int ncclReduce(const void* send, void* receive, size_t n, int type, int operation, int root,
                   Communicator* c, cudaStream_t stream) {
  std::vector<char> unused(n * type_size[type]);
  void* target = c->rank == root ? receive : unused.data();
  return ncclAllReduce(send, target, n, type, operation, c, stream);
}
API int ncclBroadcast(const void* send, void* receive, size_t n, int type, int root,
                      Communicator* c, cudaStream_t) {
  const size_t size = c->rank == root ? n * type_size[type] : 0;
  c->exchange(send, size, [&](int, const char* bytes, size_t offset, size_t length) {
    memcpy((char*)receive + offset, bytes, length);
  });
  return 0;
}
API int ncclRedOpCreatePreMulSum(int* operation, void* scalar, int type, int, Communicator*) {
  *operation = FIRST_SCALED + scales.size();
  scales[*operation] = type == FLOAT64 ? *(double*)scalar : *(float*)scalar;
  return 0;
}
API int ncclRedOpDestroy(int, Communicator*) { return 0; }

API int ncclGroupStart() {
  group_depth++;
  return 0;
}
API int ncclGroupEnd() {
  if (--group_depth == 0) exchange_messages();
  return 0;
}
API int ncclSend(const void* bytes, size_t n, int type, int peer, Communicator* c, cudaStream_t) {
  sends.push_back({c, (char*)bytes, n * type_size[type], peer});
  if (!group_depth) exchange_messages();
  return 0;
}
API int ncclRecv(void* bytes, size_t n, int type, int peer, Communicator* c, cudaStream_t) {
  receives.push_back({c, (char*)bytes, n * type_size[type], peer});
  if (!group_depth) exchange_messages();
  return 0;
}
