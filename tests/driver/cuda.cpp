// The functions of libcuda that Frit calls, over `device.h`, each with the rules that its documentation states.
// What a call may not do is answered with the code that the driver gives, and is a violation in the log.
//
//   FRIT_DEVICE_CAPABILITY  compute capability, such as 90; 0 for a machine without a GPU
//   FRIT_DEVICE_VERSION     what cuDriverGetVersion says
//   FRIT_DEVICE_MEMORY      bytes of device memory
//   FRIT_DEVICE_MULTIPROCESSORS  how many there are
//   FRIT_DEVICE_FAIL        `NAME N CODE`: what the N-th call of a function answers; of `kernel`, what the N-th
//                           launch of one leads to when it runs
//   FRIT_DEVICE_SEED        of the order of what may be done in any order
//   FRIT_DEVICE_LOG         the file of calls, launches and violations, by number
#include "module.h"
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

using namespace device;
#define API extern "C" __attribute__((visibility("default"))) int

namespace {
std::recursive_mutex lock;
bool initialized;
thread_local void* current;
int primary;
// What exists, by its kind.
std::set<const void*> streams, events, graphs, executables, modules, functions;

u64 setting(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}
u32 capability() { return u32(setting("FRIT_DEVICE_CAPABILITY", 90)); }
size_t memory_bytes() { return setting("FRIT_DEVICE_MEMORY", 80ull << 30); }

// Whether this is the call that is to fail.
int wanted_failure(const std::string& name) {
    static std::map<std::string, u64> calls;
    const char* text = getenv("FRIT_DEVICE_FAIL");
    u64 number = ++calls[name], wanted = 0;
    int code = 0;
    std::string which;
    std::istringstream(text ? text : "") >> which >> wanted >> code;
    return which == name && number == wanted ? code : SUCCESS;
}

// The device goes on by itself, whether or not anything is asked of it, until the process ends.
std::atomic<bool> ending;
std::thread progress;
void go_on() {
    while (!ending) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        std::lock_guard<std::recursive_mutex> held(lock);
        advance();
    }
}
void stop() {
    if (!ending.exchange(true)) progress.join();
}

enum Needs { NOTHING, INITIALIZED, CONTEXT };

// A call: in turn with others, counted, and refused where all calls are.
struct Call {
    std::lock_guard<std::recursive_mutex> held{lock};
    const char* name;
    int code = SUCCESS;
    Call(const char* name, Needs needs, bool is_safe = true) : name(name) {
        count(std::string("call ") + name);
        code = wanted_failure(name);
        if (code != SUCCESS) return;
        if (needs != NOTHING && !initialized) code = broken(NOT_INITIALIZED, "before cuInit");
        else if (needs == CONTEXT && !current) code = broken(INVALID_CONTEXT, "without a context");
        else if (needs == CONTEXT && sticky_error() != SUCCESS) code = sticky_error();
        else if (auto capture = is_safe ? nullptr : open_capture()) {
            capture->broken = CAPTURE_INVALIDATED;
            code = broken(CAPTURE_UNSUPPORTED, "while capturing");
        } else if (needs == CONTEXT) {
            advance();
        }
    }
    int broken(Code code, const std::string& why) {
        violate(std::string(name) + " " + why);
        return code;
    }
    template <class T> bool knows(const std::set<const void*>& all, const T* handle) { return all.count(handle) > 0; }
    int result(Code code, const char* why) { return code == SUCCESS ? code : broken(code, why); }
};
#define ENTER(...) Call call(__func__, __VA_ARGS__); if (call.code != SUCCESS) return call.code
#define EXPECT(is, code, why) if (!(is)) return call.broken(code, why)

const std::map<int, std::pair<const char*, const char*>> TEXTS = {
    {SUCCESS, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_PTX, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {MISALIGNED, {"CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
    {CAPTURE_INVALIDATED, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
};

// A copy or a fill: everything within an allocation, or on the host.
struct Range { const void* at; size_t bytes; bool on_device; };
bool exists(const Range& r) {
    const Allocation* found = find(r.at, r.bytes);
    return !r.on_device || (found != nullptr);
}
} // namespace

API cuInit(u32 flags) {
    ENTER(NOTHING);
    EXPECT(flags == 0, INVALID_VALUE, "with flags");
    if (capability() == 0) return NO_DEVICE;
    if (!initialized) {
        progress = std::thread(go_on);
        atexit(stop);
    }
    initialized = true;
    return SUCCESS;
}
API cuDriverGetVersion(int* version) {
    ENTER(NOTHING);
    *version = int(setting("FRIT_DEVICE_VERSION", 12080));
    return SUCCESS;
}
static int text(int code, const char** out, bool name) {
    auto found = TEXTS.find(code);
    *out = found == TEXTS.end() ? nullptr : name ? found->second.first : found->second.second;
    return *out ? SUCCESS : INVALID_VALUE;
}
API cuGetErrorName(int code, const char** out) { return text(code, out, true); }
API cuGetErrorString(int code, const char** out) { return text(code, out, false); }

// What NVIDIA's libraries ask of each other beside the documented functions is not there.
API cuGetExportTable(const void**, const void*) { return NOT_FOUND; }

API cuDeviceGetCount(int* n) { ENTER(INITIALIZED); *n = 1; return SUCCESS; }
API cuDeviceGet(int* device, int ordinal) {
    ENTER(INITIALIZED);
    EXPECT(ordinal == 0, INVALID_DEVICE, "of a device that is not there");
    *device = 0;
    return SUCCESS;
}
API cuDeviceGetName(char* name, int room, int) {
    ENTER(INITIALIZED);
    strncpy(name, capability() == 80 ? "NVIDIA A100-SXM4-80GB" : "NVIDIA H100 80GB HBM3", size_t(room) - 1);
    return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    ENTER(INITIALIZED);
    const std::map<int, int> known = {
        {16, int(setting("FRIT_DEVICE_MULTIPROCESSORS", 132))}, {75, int(capability() / 10)}, {76, int(capability() % 10)}};
    auto found = known.find(attribute);
    EXPECT(found != known.end(), INVALID_VALUE, "for attribute " + std::to_string(attribute));
    *value = found->second;
    return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* bytes, int) { ENTER(INITIALIZED); *bytes = memory_bytes(); return SUCCESS; }
API cuDevicePrimaryCtxRetain(void** context, int) { ENTER(INITIALIZED); *context = &primary; return SUCCESS; }
API cuCtxSetCurrent(void* context) { ENTER(INITIALIZED); current = context; return SUCCESS; }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(CONTEXT);
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

API cuMemGetInfo_v2(size_t* free, size_t* total) {
    ENTER(CONTEXT);
    *total = memory_bytes();
    *free = *total - allocated_bytes();
    return SUCCESS;
}
API cuMemAlloc_v2(u64* at, size_t bytes) {
    ENTER(CONTEXT, false);
    EXPECT(bytes > 0, INVALID_VALUE, "of nothing");
    if (bytes > memory_bytes() - allocated_bytes()) return OUT_OF_MEMORY;
    Allocation* made = allocate(bytes, false);
    if (!made) return OUT_OF_MEMORY;
    *at = made->begin;
    return SUCCESS;
}
API cuMemFree_v2(u64 at) {
    ENTER(CONTEXT, false);
    EXPECT(release(at), INVALID_VALUE, "of what was not allocated");
    return SUCCESS;
}
API cuMemHostAlloc(void** at, size_t bytes, u32 flags) {
    ENTER(CONTEXT, false);
    EXPECT(bytes > 0 && flags < 8, INVALID_VALUE, "of nothing");
    Allocation* made = allocate(bytes, true);
    if (!made) return OUT_OF_MEMORY;
    *at = reinterpret_cast<void*>(made->begin);
    return SUCCESS;
}

API cuStreamCreateWithPriority(Stream** made, u32 flags, int priority) {
    ENTER(CONTEXT);
    EXPECT(flags <= 1, INVALID_VALUE, "with flags");
    *made = new Stream;
    (*made)->priority = std::min(0, std::max(priority, -5));
    (*made)->is_blocking = flags == 0;
    streams.insert(*made);
    return SUCCESS;
}
API cuStreamWaitEvent(Stream* stream, Event* event, u32 flags) {
    ENTER(CONTEXT);
    EXPECT(call.knows(streams, stream) && call.knows(events, event) && flags <= 1, INVALID_HANDLE, "of no handle");
    EXPECT(event->was_recorded, INVALID_VALUE, "for an event that was never recorded");
    return call.result(wait(stream, event), "across the boundary of a capture");
}
API cuEventCreate(Event** made, u32 flags) {
    ENTER(CONTEXT);
    EXPECT((flags & ~7u) == 0, INVALID_VALUE, "with flags");
    *made = new Event;
    (*made)->timing = (flags & 2) == 0;
    events.insert(*made);
    return SUCCESS;
}
API cuEventRecord(Event* event, Stream* stream) {
    ENTER(CONTEXT);
    EXPECT(call.knows(streams, stream) && call.knows(events, event), INVALID_HANDLE, "of no handle");
    record(event, stream);
    return SUCCESS;
}
API cuEventQuery(Event* event) {
    ENTER(CONTEXT, false);
    EXPECT(call.knows(events, event), INVALID_HANDLE, "of no handle");
    EXPECT(!event->capture, CAPTURED_EVENT, "for an event of a capture");
    if (!event->was_recorded || event->op->done) return SUCCESS;
    // The device goes on while the host asks.
    if (device::random() % 2 == 0 || !finish(event->op)) return NOT_READY;
    return sticky_error();
}
API cuEventElapsedTime(float* ms, Event* from, Event* to) {
    ENTER(CONTEXT);
    EXPECT(call.knows(events, from) && call.knows(events, to), INVALID_HANDLE, "of no handle");
    for (const Event* event : {from, to}) {
        EXPECT(event->timing && event->was_recorded && !event->capture, INVALID_HANDLE, "for an event without a time");
        EXPECT(event->op->done, NOT_READY, "for an event that is not reached");
    }
    *ms = float((to->us - from->us) / 1e3);
    return SUCCESS;
}

// Copies; what the host lends is read when its turn comes, though the driver may read sooner what is not pinned.
API cuMemcpyHtoDAsync_v2(u64 to, const void* from, size_t bytes, Stream* stream) {
    ENTER(CONTEXT);
    auto* target = reinterpret_cast<u8*>(to);
    EXPECT(call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    EXPECT(exists({target, bytes, true}), INVALID_VALUE, "outside of an allocation");
    EXPECT(find(from, bytes) || !stream->capture, CAPTURE_UNSUPPORTED, "from memory that is not pinned, while capturing");
    put(stream, [=] { memcpy(target, from, bytes); return true; });
    return SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void* to, u64 from, size_t bytes, Stream* stream) {
    ENTER(CONTEXT);
    auto* source = reinterpret_cast<const u8*>(from);
    EXPECT(call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    EXPECT(exists({source, bytes, true}), INVALID_VALUE, "outside of an allocation");
    EXPECT(find(to, bytes) || !stream->capture, CAPTURE_UNSUPPORTED, "to memory that is not pinned, while capturing");
    put(stream, [=] { memcpy(to, source, bytes); return true; });
    return SUCCESS;
}
API cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream* stream) {
    ENTER(CONTEXT);
    auto *target = reinterpret_cast<u8*>(to), *source = reinterpret_cast<u8*>(from);
    EXPECT(call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    EXPECT(exists({target, bytes, true}) && exists({source, bytes, true}), INVALID_VALUE, "outside of an allocation");
    EXPECT(target + bytes <= source || source + bytes <= target, INVALID_VALUE, "of memory to itself");
    put(stream, [=] { memcpy(target, source, bytes); return true; });
    return SUCCESS;
}
API cuMemsetD8Async(u64 at, u8 value, size_t bytes, Stream* stream) {
    ENTER(CONTEXT);
    auto* target = reinterpret_cast<u8*>(at);
    EXPECT(call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    EXPECT(exists({target, bytes, true}), INVALID_VALUE, "outside of an allocation");
    put(stream, [=] { memset(target, value, bytes); return true; });
    return SUCCESS;
}

API cuModuleLoadDataEx(Module** made, const void* image, u32 n, int* options, void** values) {
    ENTER(CONTEXT, false);
    auto* bytes = static_cast<const char*>(image);
    auto module = std::make_unique<Module>();
    std::string log;
    bool is_elf = memcmp(bytes, "\x7f" "ELF", 4) == 0;
    Code code = is_elf ? load_elf(image, *module, log) : load_ptx(bytes, *module, log);
    char* buffer = nullptr;
    size_t room = 0;
    for (u32 i = 0; i < n; i++) {
        if (options[i] == 5) buffer = static_cast<char*>(values[i]);
        else if (options[i] == 6) room = size_t(uintptr_t(values[i])) & 0xffffffff;
        else EXPECT(false, INVALID_VALUE, "with option " + std::to_string(options[i]));
    }
    if (code != SUCCESS) {
        if (buffer && room > 0) strncpy(buffer, log.c_str(), room - 1);
        return code;
    }
    // What is registered last is called first: before the module's own memory is gone.
    atexit(stop);
    *made = module.release();
    modules.insert(*made);
    return SUCCESS;
}
API cuModuleGetFunction(Kernel** made, Module* module, const char* name) {
    ENTER(CONTEXT);
    EXPECT(call.knows(modules, module), INVALID_HANDLE, "of no handle");
    auto found = module->kernels.find(name);
    if (found == module->kernels.end()) return NOT_FOUND;
    *made = found->second.get();
    functions.insert(*made);
    return SUCCESS;
}
API cuFuncSetAttribute(Kernel* kernel, int attribute, int value) {
    ENTER(CONTEXT);
    EXPECT(call.knows(functions, kernel), INVALID_HANDLE, "of no handle");
    EXPECT(attribute == 8 && value >= 0, INVALID_VALUE, "of attribute " + std::to_string(attribute));
    // What a block may have at most: 163 KiB or 227 KiB.
    u32 most = (capability() == 80 ? 163 : 227) << 10;
    if (u32(value) + kernel->static_shared > most) return INVALID_VALUE;
    kernel->allowed_shared = u32(value);
    return SUCCESS;
}
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads, size_t shared) {
    ENTER(CONTEXT);
    EXPECT(call.knows(functions, kernel), INVALID_HANDLE, "of no handle");
    EXPECT(threads > 0 && u32(threads) <= kernel->most_threads, INVALID_VALUE, "of such a block");
    EXPECT(shared <= kernel->most_dynamic_shared(), INVALID_VALUE, "of so much shared memory");
    // As many as threads alone allow.
    *blocks = 2048 / threads;
    return SUCCESS;
}
API cuLaunchKernel(Kernel* kernel, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared, Stream* stream,
                   void** parameters, void** extra) {
    ENTER(CONTEXT);
    EXPECT(call.knows(streams, stream) && call.knows(functions, kernel), INVALID_HANDLE, "of no handle");
    EXPECT(gx > 0 && gy > 0 && gz > 0 && gx < 1u << 31 && gy < 1 << 16 && gz < 1 << 16, INVALID_VALUE, "of such a grid");
    EXPECT(bx > 0 && by > 0 && bz > 0 && bz <= 64 && u64(bx) * by * bz <= kernel->most_threads, INVALID_VALUE, "of such a block");
    EXPECT(shared <= kernel->most_dynamic_shared(), INVALID_VALUE, "of so much shared memory");
    EXPECT(kernel->registers * bx * by * bz <= 64 << 10, OUT_OF_RESOURCES, "of so many registers");
    EXPECT(!extra, INVALID_VALUE, "with parameters in two ways");
    std::vector<std::vector<u8>> copies;
    for (size_t i = 0; i < kernel->parameters.size(); i++) {
        auto* at = static_cast<const u8*>(parameters[i]);
        copies.emplace_back(at, at + kernel->parameters[i]);
    }
    Launch launch{{gx, gy, gz}, {bx, by, bz}, shared};
    int failure = wanted_failure("kernel");
    put(stream, [=]() mutable {
        count("kernel " + kernel->name);
        if (failure != SUCCESS) throw Fault{Code(failure)};
        std::vector<void*> pointers;
        for (auto& copy : copies) pointers.push_back(copy.data());
        if (kernel->run) kernel->run(launch, pointers.data());
        return true;
    });
    return SUCCESS;
}

API cuStreamBeginCapture_v2(Stream* stream, int mode) {
    ENTER(CONTEXT);
    EXPECT(call.knows(streams, stream) && !stream->is_blocking, INVALID_HANDLE, "of no handle");
    return call.result(begin_capture(stream, mode == 2), "of a stream that is captured");
}
API cuStreamEndCapture(Stream* stream, Graph** made) {
    ENTER(CONTEXT);
    EXPECT(call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    Code code = end_capture(stream, made);
    if (code == SUCCESS) graphs.insert(*made);
    return call.result(code, "of a capture that is broken or not joined");
}
API cuGraphInstantiateWithFlags(Executable** made, Graph* graph, u64 flags) {
    ENTER(CONTEXT, false);
    EXPECT(call.knows(graphs, graph), INVALID_HANDLE, "of no handle");
    EXPECT((flags & ~15ull) == 0, INVALID_VALUE, "with flags");
    *made = new Executable{graph->nodes, (flags & 8) != 0};
    executables.insert(*made);
    return SUCCESS;
}
API cuGraphDestroy(Graph* graph) {
    ENTER(CONTEXT);
    EXPECT(graphs.erase(graph) == 1, INVALID_HANDLE, "of no handle");
    delete graph;
    return SUCCESS;
}
API cuGraphExecDestroy(Executable* graph) {
    {
        // Also after an error.
        ENTER(INITIALIZED);
        EXPECT(current, INVALID_CONTEXT, "without a context");
        EXPECT(call.knows(executables, graph), INVALID_HANDLE, "of no handle");
    }
    // What runs of it ends first, however long that takes.
    for (int polls = 0;; polls++) {
        {
            std::lock_guard<std::recursive_mutex> held(lock);
            bool done = true;
            for (const Put& op : graph->launched) done = finish(op) && done;
            if (done || polls == 5000) {
                if (!done) violate("cuGraphExecDestroy of what does not end");
                executables.erase(graph);
                delete graph;
                return sticky_error();
            }
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}
API cuGraphUpload(Executable* graph, Stream* stream) {
    ENTER(CONTEXT);
    EXPECT(call.knows(executables, graph) && call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    return SUCCESS;
}
API cuGraphLaunch(Executable* graph, Stream* stream) {
    ENTER(CONTEXT);
    EXPECT(call.knows(executables, graph) && call.knows(streams, stream), INVALID_HANDLE, "of no handle");
    EXPECT(!stream->capture, CAPTURE_UNSUPPORTED, "while capturing");
    launch(graph, stream);
    return SUCCESS;
}

// For the stand-ins of other libraries.
#define PUBLIC extern "C" __attribute__((visibility("default")))
#define IN_TURN std::lock_guard<std::recursive_mutex> held(lock)
PUBLIC void frit_device_put(void* stream, bool (*work)(void*), void* data) {
    IN_TURN;
    put(static_cast<Stream*>(stream), [=] { return work(data); });
}
// After everything that was put in the same turn, whatever its stream.
PUBLIC void frit_device_put_in_turn(void* stream, void** turn, bool (*work)(void*), void* data) {
    IN_TURN;
    if (!*turn) *turn = new Stream;
    put_in_turn(static_cast<Stream*>(stream), static_cast<Stream*>(*turn), [=] { return work(data); });
}
PUBLIC bool frit_device_has(const void* at, size_t bytes) {
    IN_TURN;
    return find(at, bytes) != nullptr;
}
PUBLIC bool frit_device_has_graphs() {
    IN_TURN;
    return !executables.empty();
}
PUBLIC void frit_device_count(const char* what) {
    IN_TURN;
    count(what);
}
PUBLIC void frit_device_violate(const char* rule) {
    IN_TURN;
    violate(rule);
}
