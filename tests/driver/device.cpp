#include "device.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sys/mman.h>

namespace device {
namespace {
std::vector<Allocation*> allocations;
std::vector<Put> pending;
std::vector<std::shared_ptr<Capture>> captures;
Code sticky = SUCCESS;

// One line for each thing.
struct Log {
    std::map<std::string, u64> counts;
    ~Log() { write(); }
    void write() const {
        const char* path = getenv("FRIT_DEVICE_LOG");
        FILE* file = path ? fopen(path, "w") : nullptr;
        if (!file) return;
        for (const auto& line : counts) fprintf(file, "%s\t%llu\n", line.first.c_str(), (unsigned long long)line.second);
        fclose(file);
    }
} log;

double now_us() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double, std::micro>(now).count();
}

bool is_ready(const Put& op) {
    return std::all_of(op->after.begin(), op->after.end(), [](const Put& p) { return p->done; });
}

bool do_one(const Put& op) {
    // After an error nothing is done any more.
    if (sticky == SUCCESS) {
        try {
            if (!op->work()) return false;
        } catch (const Fault& fault) {
            sticky = fault.code;
        }
    }
    op->done = true;
    op->work = nullptr;
    op->after.clear();
    return true;
}

// Does what is ready of these in a random order until `end` says so; false if all of it waits.
template <class End> bool work_on(std::vector<Put> ops, End end) {
    while (!end()) {
        std::vector<Put> ready;
        for (const Put& op : ops)
            if (!op->done && is_ready(op)) ready.push_back(op);
        bool moved = false;
        while (!ready.empty() && !moved) {
            size_t i = random() % ready.size();
            moved = do_one(ready[i]);
            ready.erase(ready.begin() + i);
        }
        if (!moved) return false;
        ops.erase(std::remove_if(ops.begin(), ops.end(), [](const Put& op) { return op->done; }), ops.end());
    }
    return true;
}

void forget_done() {
    pending.erase(std::remove_if(pending.begin(), pending.end(), [](const Put& op) { return op->done; }),
                  pending.end());
}

void ancestors(const Put& op, std::set<Put>& found) {
    std::vector<Put> open{op};
    while (!open.empty()) {
        Put next = open.back();
        open.pop_back();
        if (next->done || !found.insert(next).second) continue;
        open.insert(open.end(), next->after.begin(), next->after.end());
    }
}

void leave(Capture& capture) {
    for (Stream* stream : capture.streams) {
        stream->capture = nullptr;
        stream->captured_front.clear();
    }
    for (auto it = captures.begin(); it != captures.end(); ++it)
        if (it->get() == &capture) { captures.erase(it); return; }
}
} // namespace

u64 random() {
    static u64 state = [] {
        const char* seed = getenv("FRIT_DEVICE_SEED");
        return 0x9e3779b97f4a7c15ull * (1 + (seed ? strtoull(seed, nullptr, 10) : 0));
    }();
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

Allocation* allocate(size_t bytes, bool pinned) {
    // Between two pages that nobody may touch; it ends where the second one begins, up to the alignment of 256.
    const size_t page = 4096;
    size_t whole = (bytes + page - 1) / page * page;
    auto* at = static_cast<u8*>(mmap(nullptr, whole + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (at == MAP_FAILED || mprotect(at + page, whole, PROT_READ | PROT_WRITE) != 0) return nullptr;
    size_t rounded = (bytes + 255) / 256 * 256;
    auto* allocation = new Allocation{uintptr_t(at) + page + whole - rounded, bytes, pinned};
    // What was not written is NaN, or a large number.
    if (bytes <= (64 << 20)) memset(reinterpret_cast<void*>(allocation->begin), 0xff, bytes);
    allocations.push_back(allocation);
    return allocation;
}

bool release(uintptr_t begin) {
    for (const Put& op : std::vector<Put>(pending)) finish(op);
    auto is_it = [&](const Allocation* a) { return a->begin == begin && !a->pinned; };
    auto found = std::find_if(allocations.begin(), allocations.end(), is_it);
    if (found == allocations.end()) return false;
    const size_t page = 4096;
    uintptr_t from = begin / page * page;
    mprotect(reinterpret_cast<void*>(from), (begin + (*found)->bytes - from + page - 1) / page * page, PROT_NONE);
    delete *found;
    allocations.erase(found);
    return true;
}

const Allocation* find(const void* at, size_t bytes) {
    uintptr_t from = uintptr_t(at);
    for (size_t i = 0; i < allocations.size(); i++) {
        Allocation* a = allocations[i];
        if (from >= a->begin && from - a->begin <= a->bytes && bytes <= a->bytes - (from - a->begin)) {
            if (i > 0) std::swap(allocations[0], allocations[i]);
            return a;
        }
    }
    return nullptr;
}

size_t allocated_bytes() {
    size_t sum = 0;
    for (const Allocation* a : allocations) sum += a->pinned ? 0 : a->bytes;
    return sum;
}

void check_access(const void* at, size_t bytes, size_t alignment) {
    if (uintptr_t(at) % alignment != 0) throw Fault{MISALIGNED};
    if (!find(at, bytes)) throw Fault{ILLEGAL_ADDRESS};
}

void put(Stream* stream, Work work) {
    if (stream->capture) {
        Capture& capture = *stream->capture;
        capture.nodes.push_back(Node{std::move(work), stream->captured_front, stream->priority});
        stream->captured_front = {capture.nodes.size() - 1};
        return;
    }
    auto op = std::make_shared<Op>();
    op->work = std::move(work);
    op->after = stream->front;
    stream->front = {op};
    pending.push_back(op);
}

void put_in_turn(Stream* stream, Stream* turn, Work work) {
    if (stream->capture) {
        auto& front = stream->captured_front;
        if (turn->capture == stream->capture) front.insert(front.end(), turn->captured_front.begin(), turn->captured_front.end());
        else stream->capture->streams.push_back(turn);
        put(stream, std::move(work));
        turn->capture = stream->capture;
        turn->captured_front = front;
        return;
    }
    stream->front.insert(stream->front.end(), turn->front.begin(), turn->front.end());
    put(stream, std::move(work));
    turn->front = stream->front;
}

void record(Event* event, Stream* stream) {
    event->was_recorded = true;
    event->capture = stream->capture;
    event->nodes = stream->captured_front;
    if (stream->capture) return;
    put(stream, [event] {
        event->us = now_us();
        return true;
    });
    event->op = stream->front[0];
}

Code wait(Stream* stream, Event* event) {
    if (!event->was_recorded) return SUCCESS;
    if (event->capture) {
        bool open = std::find(captures.begin(), captures.end(), event->capture) != captures.end();
        if (!open) return CAPTURE_ISOLATION;
        if (stream->capture && stream->capture != event->capture) return CAPTURE_MERGE;
        if (!stream->capture) {
            stream->capture = event->capture;
            stream->capture->streams.push_back(stream);
        }
        auto& front = stream->captured_front;
        for (size_t node : event->nodes)
            if (std::find(front.begin(), front.end(), node) == front.end()) front.push_back(node);
        return SUCCESS;
    }
    if (stream->capture) {
        stream->capture->broken = CAPTURE_ISOLATION;
        return CAPTURE_ISOLATION;
    }
    if (!event->op->done) stream->front.push_back(event->op);
    return SUCCESS;
}

Code begin_capture(Stream* stream, bool anywhere) {
    if (stream->capture) return ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->thread = std::this_thread::get_id();
    capture->anywhere = anywhere;
    capture->streams = {stream};
    stream->capture = capture;
    captures.push_back(capture);
    return SUCCESS;
}

Code end_capture(Stream* stream, Graph** graph) {
    auto capture = stream->capture;
    *graph = nullptr;
    if (!capture) return ILLEGAL_STATE;
    if (capture->origin != stream) return CAPTURE_UNMATCHED;
    if (!capture->anywhere && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    // Everything must come before what the first stream does next.
    std::vector<bool> joined(capture->nodes.size());
    std::vector<size_t> open = stream->captured_front;
    while (!open.empty()) {
        size_t node = open.back();
        open.pop_back();
        if (joined[node]) continue;
        joined[node] = true;
        open.insert(open.end(), capture->nodes[node].after.begin(), capture->nodes[node].after.end());
    }
    bool all = std::all_of(joined.begin(), joined.end(), [](bool is) { return is; });
    leave(*capture);
    if (capture->broken != SUCCESS) return CAPTURE_INVALIDATED;
    if (!all) return CAPTURE_UNJOINED;
    *graph = new Graph{capture->nodes};
    return SUCCESS;
}

void launch(const Executable* graph, Stream* stream) {
    std::vector<Put> ops;
    std::vector<bool> is_last(graph->nodes.size(), true);
    for (const Node& node : graph->nodes) {
        auto op = std::make_shared<Op>();
        op->work = node.work;
        for (size_t before : node.after) {
            op->after.push_back(ops[before]);
            is_last[before] = false;
        }
        if (node.after.empty()) op->after = stream->front;
        count("node of priority " + std::to_string(graph->by_priority ? node.priority : stream->priority));
        ops.push_back(op);
        pending.push_back(op);
    }
    if (ops.empty()) return;
    auto& launched = graph->launched;
    launched.erase(std::remove_if(launched.begin(), launched.end(), [](const Put& op) { return op->done; }), launched.end());
    launched.insert(launched.end(), ops.begin(), ops.end());
    stream->front.clear();
    for (size_t i = 0; i < ops.size(); i++)
        if (is_last[i]) stream->front.push_back(ops[i]);
}

std::shared_ptr<Capture> open_capture() {
    for (auto& capture : captures)
        if (!capture->anywhere && capture->thread == std::this_thread::get_id()) return capture;
    return nullptr;
}

bool finish(const Put& op) {
    std::set<Put> before;
    ancestors(op, before);
    bool done = work_on({before.begin(), before.end()}, [&] { return op->done; });
    forget_done();
    return done;
}

void advance() {
    size_t n = random() % 4 == 0 ? random() % 16 : 0;
    work_on(pending, [&] { return n-- == 0 || pending.empty(); });
    forget_done();
}

Code sticky_error() { return sticky; }

void count(const std::string& what, u64 n) { log.counts[what] += n; }
void violate(const std::string& rule) {
    fprintf(stderr, "device: %s\n", rule.c_str());
    count("violation: " + rule);
    // The process may end without its exit handlers.
    log.write();
}

} // namespace device
