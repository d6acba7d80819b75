// The scheduler of `cuda.h`. Threads of a block run in ascending or descending order, each until it
// waits; asynchronous copies happen at the last moment that their waits allow. What a kernel forgets to
// wait for is thereby not there yet.
#include "cuda.h"
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

namespace host {
dim3 thread, block, threads, blocks;
u8* dynamic_shared;

namespace {
const size_t STACK = 256 << 10;
enum State { READY, BARRIER, WARP, DONE };
struct Copy { void* to; const void* from; u32 bytes; };
struct Fiber {
    State state = DONE;
    bool entered = false;
    jmp_buf at;
    ucontext_t first;
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;
};
struct Warp { u32 arrived; const char* what; void* arguments[32]; };

std::vector<Fiber> fibers;
std::vector<Warp> warps;
std::vector<u8> shared_memory;
jmp_buf scheduler;
ucontext_t scheduler_context;
u32 current;
void (*body)(void*);
void* context;

[[noreturn]] void fail(const char* what) {
    fprintf(stderr, "block (%u, %u, %u), thread %u: %s\n", block.x, block.y, block.z, current, what);
    abort();
}

void yield(State state) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    if (_setjmp(fiber.at) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        body(context);
        yield(DONE);
    }
}

void resume(u32 i) {
    current = i;
    thread = dim3{i, 0, 0};
    Fiber& fiber = fibers[i];
    if (_setjmp(scheduler) != 0) return;
    if (fiber.entered) _longjmp(fiber.at, 1);
    fiber.entered = true;
    setcontext(&fiber.first);
}

void run_block(bool reversed) {
    u32 n = threads.x;
    memset(dynamic_shared, 0xff, shared_memory.size() - 128);
    for (u32 i = 0; i < n; i++) {
        fibers[i].state = READY;
        fibers[i].open.clear();
        fibers[i].groups.clear();
    }
    for (auto& warp : warps) warp.arrived = 0;
    for (;;) {
        u32 ran = 0, waiting = 0, done = 0;
        for (u32 step = 0; step < n; step++) {
            u32 i = reversed ? n - 1 - step : step;
            if (fibers[i].state == READY) resume(i), ran++;
        }
        for (u32 i = 0; i < n; i++) {
            waiting += fibers[i].state == BARRIER;
            done += fibers[i].state == DONE;
        }
        if (done == n) return;
        if (waiting > 0 && waiting + done == n) {
            for (u32 i = 0; i < n; i++)
                if (fibers[i].state == BARRIER) fibers[i].state = READY;
        } else if (ran == 0) {
            fail("the block is stuck: threads wait in different places");
        }
    }
}
} // namespace

void barrier() { yield(BARRIER); }

void meet(const char* what, void* argument, void (*work)(void**)) {
    u32 self = current;
    Warp& warp = warps[self / 32];
    if (warp.arrived > 0 && strcmp(warp.what, what) != 0) fail("lanes meet in different places");
    warp.what = what;
    warp.arguments[self % 32] = argument;
    if (++warp.arrived < 32) {
        yield(WARP);
        return;
    }
    warp.arrived = 0;
    work(warp.arguments);
    for (u32 lane = self / 32 * 32; lane < self / 32 * 32 + 32; lane++)
        if (fibers[lane].state == WARP) fibers[lane].state = READY;
}

void copy_async(void* to, const void* from, u32 bytes) {
    memset(to, 0xff, bytes);
    fibers[current].open.push_back(Copy{to, from, bytes});
}

void copy_async_commit() {
    Fiber& fiber = fibers[current];
    fiber.groups.push_back(std::move(fiber.open));
    fiber.open.clear();
}

void copy_async_wait(u32 pending) {
    auto& groups = fibers[current].groups;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) {
            if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
            else memset(copy.to, 0, copy.bytes);
        }
        groups.erase(groups.begin());
    }
}

void run(const u32* grid, u32 n, u32 shared, bool reversed, void (*kernel)(void*), void* arguments) {
    if (n % 32 != 0 || n > 1024) fail("a block must have whole warps, at most 32");
    blocks = dim3{grid[0], grid[1], grid[2]};
    threads = dim3{n, 1, 1};
    warps.assign(n / 32, Warp());
    shared_memory.assign(shared + 256, 0);
    dynamic_shared = reinterpret_cast<u8*>((uintptr_t(shared_memory.data()) + 127) / 128 * 128);
    body = kernel, context = arguments;
    if (fibers.capacity() < 1024) fibers.reserve(1024);
    while (fibers.size() < n) {
        fibers.emplace_back();
        Fiber& fiber = fibers.back();
        getcontext(&fiber.first);
        fiber.first.uc_stack.ss_sp = malloc(STACK);
        fiber.first.uc_stack.ss_size = STACK;
        fiber.first.uc_link = nullptr;
        makecontext(&fiber.first, fiber_main, 0);
    }
    for (block.z = 0; block.z < blocks.z; block.z++)
        for (block.y = 0; block.y < blocks.y; block.y++)
            for (block.x = 0; block.x < blocks.x; block.x++) run_block(reversed);
}
} // namespace host
