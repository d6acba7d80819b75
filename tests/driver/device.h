// A GPU that is this process: device memory is host memory, and what is put on streams is done later, one thing
// after the other in any order that streams, events and graphs allow. `cuda.cpp` is libcuda's functions over it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

namespace device {

// Codes of cuda.h.
enum Code : int {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_PTX = 218, INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701,
    MISALIGNED = 716, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};

// Something that a kernel did wrong, as the driver reports it afterwards.
struct Fault { Code code; };

// What is done when its turn comes; false if it waits for another process.
typedef std::function<bool()> Work;

struct Op {
    Work work;
    std::vector<std::shared_ptr<Op>> after;
    bool done = false;
};
typedef std::shared_ptr<Op> Put;

struct Node { Work work; std::vector<size_t> after; int priority; };
struct Stream;
struct Capture {
    Stream* origin;
    std::thread::id thread;
    bool anywhere;
    Code broken = SUCCESS;
    std::vector<Node> nodes;
    std::vector<Stream*> streams;
};
struct Stream {
    int priority = 0;
    bool is_blocking = false;
    // What the next thing comes after.
    std::vector<Put> front;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> captured_front;
};
struct Event {
    bool timing;
    bool was_recorded = false;
    Put op;
    double us = 0;
    std::shared_ptr<Capture> capture;
    std::vector<size_t> nodes;
};
struct Graph { std::vector<Node> nodes; };
struct Executable {
    std::vector<Node> nodes;
    bool by_priority;
    // What was launched of it, perhaps done.
    mutable std::vector<Put> launched = {};
};

// Memory, of the device or pinned on the host.
struct Allocation { uintptr_t begin; size_t bytes; bool pinned; };
Allocation* allocate(size_t bytes, bool pinned);
// Gives memory of the device back once everything is done; false if none begins there. Touching it is a fault then.
bool release(uintptr_t begin);
// The allocation that these bytes are in; null if there is none.
const Allocation* find(const void* at, size_t bytes);
size_t allocated_bytes();
// Throws a fault if a kernel may not access these bytes.
void check_access(const void* at, size_t bytes, size_t alignment);

void put(Stream* stream, Work work);
void put_in_turn(Stream* stream, Stream* turn, Work work);
void record(Event* event, Stream* stream);
Code wait(Stream* stream, Event* event);
Code begin_capture(Stream* stream, bool anywhere);
Code end_capture(Stream* stream, Graph** graph);
void launch(const Executable* graph, Stream* stream);
// The capture in this thread that calls which cannot be captured break; null if there is none.
std::shared_ptr<Capture> open_capture();

// Does things until this one is done; false if it waits for another process.
bool finish(const Put& op);
// Does a few things, perhaps.
void advance();

// The error that ends everything, once a kernel made one.
Code sticky_error();
u64 random();

// What the test reads afterwards.
void violate(const std::string& rule);
void count(const std::string& what, u64 n = 1);

} // namespace device
